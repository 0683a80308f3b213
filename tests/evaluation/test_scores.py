"""L-Eval's, InfiniteBench's and NeedleBench's scores: every rule of their authors' scripts, worked out by hand."""

import pytest

from pod.evaluation import metrics
from pod.evaluation.metrics import l_eval
from pod.evaluation.metrics.needles import likeness

# (set, prediction, the letters that are taken)
LETTERS = [
    ("tpo", " \n", "None"),  # blank
    ("tpo", "BCD", "BCD"),  # a part of ABCD stays as it is
    ("coursera", "BC", "BC"),
    ("quality", "BD", "B"),  # no part of ABCD: the first letter
    ("quality", "Answer: C", "A"),  # of `Answer`
    ("tpo", "answer: C", "C"),
    ("coursera", "DB and A.", "BD"),  # a leading run of more than one, sorted, ends it
    ("coursera", "BB", "B"),
    ("coursera", "B, and D.", "BD"),  # one letter, and those before a blank, stop or bracket
    ("coursera", "(A) or (C)", "AC"),
    ("coursera", "A. x\nQuestion D.", "A"),  # what stands after `Question` does not count
    ("coursera", "DNA is B.", "ABD"),  # the leading D counts, and the last letter of a word in capitals
    ("coursera", "E. F.", "A"),  # no letter at all
    ("coursera", "answer:DB", "DB"),  # the first run, unsorted
    ("coursera", "x", "A"),
    ("tpo", "none", "A"),
]


@pytest.mark.parametrize(("task", "prediction", "letters"), LETTERS)
def test_letters_of_a_choice(task, prediction, letters):
    assert l_eval.chosen_letters(task, prediction) == letters


def test_the_right_letters_are_those_of_the_first_word():
    assert [l_eval.right_letters(one) for one in ("BD", "C. a", "xyz A", "A,B C")] == ["BD", "C", "A", "AB"]
    with pytest.raises(ValueError, match="the right option's letter is missing"):
        metrics.leval("tpo", ["A"], [" "])


# (prediction, reference, score of the pair)
EXACT = [
    ("AB", "AB", 1.0),
    ("A", "AB", 0.25),  # some of the right ones
    ("ABC", "AB", 0.0),
    ("a", "AB", 0.25),  # an article: nothing is left, and nothing is a part of everything
    ("b", "B", 0.0),  # case counts
    ("A.", "A", 1.0),
    ("A B", "AB", 0.0),  # a blank is no letter of the reference
    ("...", "-", 1.0),  # a reference of which nothing is left (Morse code)
    (".- x", "-...", 0.0),
    ("7", "7.0", 1.0),  # numbers
    ("1e1", "10", 1.0),
    ("71", "7", 0.0),
    ("nan", "nan", 0.0),
    ("it is 7", "7", 1.0),  # one is no number: contained
    ("The Cat", "thecat", 1.0),  # no blanks, no case
    ("cat", "the cat", 0.0),
    ("x\ny", "xy", 0.0),  # a line end is no blank
]


@pytest.mark.parametrize(("prediction", "reference", "score"), EXACT)
def test_exact_match(prediction, reference, score):
    assert l_eval.exact_match(prediction, reference) == score


# (text, the digits that are taken)
NUMBERS = [
    ("The answer is $1,234.50.", "1234"),  # up to the first full stop
    ("The answer is -5", "5"),
    ("The answer is x\nThe answer is 3", ""),  # the first one decides
    ("the answer is 3 or 4 apples", "4"),  # the case counts: the last word with a digit
    ("It costs 3\n\n4 more", "3"),  # of the first paragraph
    ("so 12\n7 apples", "127"),  # words are cut at blanks only
    ("a.5", ""),
    ("none", ""),
    ("x\u00b2", "\u00b2"),  # whatever Python calls a digit
]


@pytest.mark.parametrize(("text", "digits"), NUMBERS)
def test_numbers_of_gsm100(text, digits):
    assert l_eval.last_number(text) == digits


def test_gsm100_compares_values():
    assert metrics.leval("gsm100", ["The answer is 07.", "8"], ["The answer is 7", "The answer is 9"]) == 50.0
    # No digit in the reference: it is compared as options, and any other prediction has digits that nothing has.
    assert metrics.leval("gsm100", ["5", "none"], ["none", "none"]) == 50.0


def test_output_of_code():
    # A word more than three beside the two of the reference is cut at the front; commas and quotes go.
    assert l_eval.output_of_code("w0 w1 w2 w3, 'w4' w5", "a b") == "w1 w2 w3 w4 w5"
    # After the last `the final output` the first ones, and the empty word before the blank counts.
    said = "the final output 9 so the final output will be 1 2 3 4 5"
    assert l_eval.output_of_code(said, "a") == " 1 2 3"
    # Fillings go in their order, as text: once `is` is out of `bise`, `would be` is there and goes.
    assert l_eval.output_of_code("th the value of xis 5", "5") == "th x 5"
    assert l_eval.output_of_code("would bise 1", "5") == " 1"
    assert l_eval.output_of_code("[ [1.0, 2] ]  [ 3]", "x") == "[[1 2]][ 3]"
    assert metrics.leval("codeU", ["It prints [1, 2]", "4"], ["[1,  2]", "5"]) == 50.0


def test_topics_are_averaged_by_position():
    """Lines 0, 3 are the first topics, 1 the second, 2 the third: (50 + 100 + 0) / 3."""
    predictions = ["cats and dogs", "the moon", "x", "no"]
    assert metrics.leval("topic_retrieval_longchat", predictions, ["Dogs", "Moon", "sun", "cat"]) == 50.0
    assert metrics.leval("topic_retrieval_longchat", ["dogs"], ["dogs"]) == 100.0  # --limit 1


def test_science_fiction_is_judged_twice():
    references = ["True [fact: False]", "False [fact: False]"]
    assert metrics.leval("sci_fi", ["True. [fact: It is false]", "no [fact: falsehood]"], references) == 75.0
    # The first word that says something decides; in one word, true comes before false.
    assert metrics.leval("sci_fi", ["false, not true [fact: falsetrue]", "x [fact: ]"], references) == 0.0
    assert metrics.leval("sci_fi", ["TRUE [fact: false", "x [fact: ]"], references) == 25.0  # the last character goes
    with pytest.raises(ValueError, match=r"'answer \[fact: answer\]' is expected, got 'True'"):
        metrics.leval("sci_fi", ["True"], ["True [fact: False]"])


def test_f1_sets_are_scored_as_longbench():
    assert metrics.leval("narrative_qa", ["The Paris!", "x"], ["Paris France", "y"]) == 33.3333
    assert metrics.leval("natural_question", ["a"], ["the"]) == 0.0


def test_summaries_have_three_rouges_and_their_geometric_mean():
    """Words 2 of 3 and 2 of 4, pairs 1 of 2 and 1 of 3, the subsequence 2 of 3 and 2 of 4."""
    pair = ["the cat x"], ["The CAT, sat-down"]
    one, two = 2 * 2 / 3 * 0.5 / (2 / 3 + 0.5), 0.4
    assert metrics.leval("news_summ", *pair, rouge="rouge1") == round(100 * one, 4)
    assert metrics.leval("news_summ", *pair, rouge="rouge2") == 40.0
    assert metrics.leval("news_summ", *pair, rouge="rougeL") == round(100 * one, 4)
    assert metrics.leval("news_summ", *pair) == round(100 * (one * one * two) ** (1 / 3), 4)
    # The geometric mean is of the means over the set, not a mean of geometric means.
    assert metrics.leval("news_summ", ["a b", "b"], ["a b", "b c"]) == round((500 / 6 * 50 * 500 / 6) ** (1 / 3), 4)
    # Each F is per cent before the mean: nine sixths in 64 are 2.34375, which the other order rounds to 2.3438.
    assert metrics.leval("news_summ", ["a b c d"] * 64, ["a" + " x" * 7] * 9 + ["x"] * 55, rouge="rouge1") == 2.3437


# (prediction, answer, kind, F)
ROUGE_SCORE = [
    ("", "a", "rouge1", 0.0),
    ("a", "", "rougeL", 0.0),
    ("...", "...", "rougeLsum", 0.0),
    ("caf\u00e9", "caf", "rouge1", 1.0),  # only a-z and 0-9 are letters
    ("running", "run", "rouge1", 0.0),  # no stemmer
    ("a a a", "a a", "rouge1", 0.8),  # a multiset
    ("a", "a", "rouge2", 0.0),  # no pair of words
    ("a b\nc", "b c", "rouge2", 2 * 0.5 / 1.5),  # a pair may go over a line end
    ("b a", "a b", "rougeL", 0.5),
    ("c\nb\na", "a b c", "rougeLsum", 1.0),  # the union over the predicted lines
    ("c b a", "a b c", "rougeLsum", 1 / 3),
    ("a b", "a\nb\na", "rougeLsum", 0.8),  # the second a finds none left: 2 of 2 and 2 of 3
    ("a\na", "a b", "rougeLsum", 0.5),  # one position, however many lines have it: 1 of 2 and 1 of 2
    # Ties drop the reference's word: of `a b` against `b a` the a stays, of `b c` nothing is added to c: a, c.
    ("b a\nc", "a b c", "rougeLsum", 2 / 3),
]


@pytest.mark.parametrize(("prediction", "answer", "kind", "score"), ROUGE_SCORE)
def test_rouge_score(prediction, answer, kind, score):
    assert metrics.rouge_score(prediction, answer, kind) == pytest.approx(score)


# (task, prediction, label, score)
INFINITE = [
    ("passkey", "71432 is it, 9", "71432", 1.0),
    ("passkey", "The key 71432.", ["71432"], 1.0),  # the first run of digits
    ("passkey", "1 71432", "71432", 0.0),
    ("passkey", "071432", "71432", 0.0),
    ("passkey", "\u0661 5", "5", 1.0),  # other digits are none
    ("passkey", "no", "5", 0.0),
    ("number_string", "1122 3", "1122", 1.0),
    ("longbook_qa_eng", "the Cat", ["dog", "cat."], 1.0),  # the best answer
    ("longbook_qa_eng", "cat dog", ["cat"], 2 / 3),
    ("longbook_qa_eng", "cat dog", "cat", 2 / 3),
    ("longbook_qa_eng", "", ["cat"], 0.0),
    ("longbook_choice_eng", "", ["Ann", "B"], 0.0),
    ("longbook_choice_eng", " B is right", ["Ann", "B"], 1.0),
    ("longbook_choice_eng", "Answer: B", ["Ann", "B"], 0.0),  # A of `Answer` decides
    ("longbook_choice_eng", "Ann", ["Ann", "B"], 0.0),  # so does A of the right text
    ("longbook_choice_eng", "Eve", ["Eve", "B"], 1.0),  # the whole is a label
    ("longbook_choice_eng", "Eve!", ["Eve", "B"], 0.0),  # this is not, and no word is a letter
    ("longbook_choice_eng", "the answer is: B", ["Eve", "B"], 1.0),
    ("longbook_choice_eng", "the answer is:B", ["Eve", "B"], 0.0),  # one character is left out, whatever it is
    ("longbook_choice_eng", "the answer is Eve.", ["Eve", "B"], 1.0),
    ("longbook_choice_eng", "the answer is", ["Eve", "B"], 0.0),
    ("longbook_choice_eng", "the answer: 'B'", ["Eve", "B"], 1.0),  # quotes are blanks, blanks are squeezed
    ("longbook_choice_eng", "the answer \n is B", ["Eve", "B"], 1.0),  # across lines
    ("longbook_choice_eng", "my option is C, the answer: B", ["Eve", "C"], 0.0),  # the phrases have an order
    ("longbook_choice_eng", "the answer is unclear: B", ["Eve", "B"], 0.0),  # no word is looked for after a phrase
    ("longbook_choice_eng", "say BC", ["Eve", "B"], 0.0),  # a first word that is a part of ABCD decides
    ("longbook_choice_eng", "say AD or B", ["Eve", "B"], 1.0),
    ("longbook_sum_eng", "a b", ["a", "a b"], 1.0),
    ("longbook_sum_eng", "a b", "a c", 0.5),
]


@pytest.mark.parametrize(("task", "prediction", "label", "score"), INFINITE)
def test_infinitebench(task, prediction, label, score):
    assert metrics.infinitebench(task, prediction, label) == pytest.approx(score)


# (kind, prediction, reference, score)
NEEDLES = [
    ("single", "It is the Shard.", ("On the isle lies the Shard.", "Shard"), 100.0),
    ("single", "shard", ("xyz", "Shard"), 0.0),  # case counts
    ("single", "a b\nd", ("\nabc\n", "zz"), 20 * 2 / 3),  # without blanks, a third is changed
    ("single", "", ("", "zz"), 20.0),  # two empty texts are alike
    ("multi_retrieval", "Shard, gold", ["Shard", "Gold"], 50.0),
    ("multi_retrieval", "Shard", ["S", "Sh", "x", "y"], 50.0),  # as parts of words
    ("multi_reasoning", "it was jAMES", "James Hill", 50.0),
    ("multi_reasoning", "hilly james", "James Hill", 100.0),
    ("multi_reasoning", "x", "", 0.0),
]


@pytest.mark.parametrize(("kind", "prediction", "reference", "score"), NEEDLES)
def test_needlebench(kind, prediction, reference, score):
    assert metrics.needlebench(kind, prediction, reference) == pytest.approx(score)


def test_likeness_is_the_edit_distance():
    def distance(one, other):
        row = list(range(len(other) + 1))
        for i, a in enumerate(one, start=1):
            above, row[0] = row[0], i
            for j, b in enumerate(other, start=1):
                above, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, above + (a != b))
        return row[-1]

    words = ["kitten", "sitting", "", "a", "abcabc", "cabcab", "xyz", "kitten sitting on kittens", "\u5317\u4eac"]
    for one in words:
        for other in words:
            longest = max(len(one), len(other))
            expected = 100 * (1 - distance(one, other) / longest) if longest else 100
            assert likeness(one, other) == pytest.approx(expected), (one, other)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.leval("courser", ["A"], ["A"]), "'courser' is no set of L-Eval; did you mean coursera"),
        (lambda: metrics.leval("tpo", ["A"], []), "tpo: 1 predictions but 0 references"),
        (lambda: metrics.leval("tpo", [], []), "nothing to score"),
        (lambda: metrics.leval("news_summ", ["a"], ["a"], rouge="rougeLsum"), "one of geometric_mean, rouge1"),
        (lambda: metrics.infinitebench("pass", "1", "1"), "'pass' is no task of InfiniteBench; did you mean passkey"),
        (lambda: metrics.infinitebench("passkey", "1", []), "passkey: a line without an answer"),
        (lambda: metrics.needlebench("double", "1", "1"), "'double' is no kind of NeedleBench: single"),
        (lambda: metrics.needlebench("single", "1", "1"), r"the reference of single is \(needle, keyword\), got '1'"),
        (lambda: metrics.needlebench("multi_reasoning", "1", ["1"]), "multi_reasoning is the answer"),
        (lambda: metrics.rouge_score("a", "a", "rouge3"), "'rouge3' is no kind of ROUGE"),
    ],
)
def test_what_cannot_be_scored_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
