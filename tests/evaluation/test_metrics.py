"""LongBench's and RULER's metrics against values worked out by hand, with every oddity of the authors' scripts."""

import random
import sys

import pytest

from pod.evaluation import metrics

F1 = 2 / 3  # precision 1, recall 1/2 or the other way round


def by_character(text: str) -> list[str]:
    """A segmenter for tests: every character is a word."""
    return list(text)


# (prediction, answer, F1). Counts of common, predicted and wanted words stand behind each.
TOKEN_F1 = [
    ("Paris", "Paris", 1.0),
    ("", "Paris", 0.0),
    ("Paris", "", 0.0),
    ("", "", 0.0),  # no common word, so 0 and not 1
    ("paris", "PARIS", 1.0),
    ("Paris.", "Paris", 1.0),
    ("The Paris", "Paris", 1.0),
    ("the", "the", 0.0),  # articles only: nothing is left on either side
    ("a an the", "Paris", 0.0),
    ("theory", "ory", 0.0),  # an article is a whole word
    ("U.S.A.", "USA", 1.0),  # punctuation goes before the words are cut
    ("twenty-one", "twentyone", 1.0),
    ("twenty one", "twenty-one", 0.0),
    ("a.b", "ab", 1.0),  # "a" is no article once the stop is gone
    ("Paris France", "Paris", F1),  # 1 of 2 and 1 of 1
    ("Paris", "Paris France", F1),
    ("Paris Paris", "Paris", F1),  # a multiset: the second Paris finds no partner
    ("Paris Paris", "Paris Paris", 1.0),
    ("x y z", "y z w", 2 / 3),  # 2 of 3 and 2 of 3
    ("in Paris , France", "Paris", 0.5),  # 1 of 3 and 1 of 1
    ("Paris\nFrance", "Paris France", 1.0),  # all lines count
    ("\u00abParis\u00bb", "Paris", 0.0),  # only ASCII punctuation is removed
    ("caf\u00e9", "CAF\u00c9", 1.0),
]

TOKEN_F1_ZH = [
    ("北京", "北京", 1.0),
    ("", "北京", 0.0),
    ("北京", "", 0.0),
    ("北京。", "北京", 1.0),  # full-width punctuation is removed
    ("《北京》", "北京", 0.8),  # U+300A is not in the list and stays, U+300B is removed: 2 of 3 and 2 of 2
    ("北 京", "北京", 1.0),  # blanks are no words
    ("北京市", "北京", 0.8),  # 2 of 3 and 2 of 2
    ("ABC", "abc", 1.0),
    ("a", "A.", 1.0),  # articles stay
    ("。！？", "。", 0.0),  # punctuation only: nothing is left
]

ROUGE = [
    ("the cat sat", "the cat sat", 1.0),
    ("", "the cat", 0.0),
    ("the cat", "", 0.0),
    ("", "", 0.0),
    ("...", "the cat", 0.0),  # no sentence
    (" ", "the cat", 0.0),  # one empty word, not found in the answer
    (" ", " ", 1.0),  # one empty word each, and they are alike
    ("The cat", "the cat", 0.5),  # case counts: 1 of 2 and 1 of 2
    ("cat, dog", "cat dog", 0.5),  # so does punctuation other than the full stop
    ("a b c d", "a x b y", 0.5),  # "a b": 2 of 4 and 2 of 4
    ("a a a", "a", 1.0),  # distinct words: 1 of 1 and 1 of 1
    ("a b a b", "a b", 1.0),
    ("a a b", "a c", 0.5),  # 1 of 2 and 1 of 2
    ("b a", "a b", 0.5),  # one of the two in order
    ("a. b", "a b", 1.0),  # the words found in either sentence together: 2 of 2 and 2 of 2
    ("a b.", "a b", 1.0),  # nothing after the last stop: no sentence
    ("a b. ", "a b", 0.8),  # a blank after it: an empty word, 2 of 3 and 2 of 2
    ("a b. ", "a b. ", 1.0),  # and found again in the answer
    ("w1 w2 w6 w7 w8. w1 w3 w8 w9 w5", "w1 w2 w3 w4 w5", 2 * 0.5 * 0.8 / 1.3),  # union w1 w2 w3 w5: 4 of 8, 4 of 5
    ("3.5 %", "3.5 %", 1.0),  # a decimal point is a full stop
    ("x", "y", 0.0),
    ("a\nb", "a b", 1.0),  # any blank separates words
]
CLASSES = ["Date", "Other location", "location", "City", "Other entity", "entity", "Currency name"]
# (prediction, answer, classes, score)
CLASSIFICATION = [
    ("Date", "Date", CLASSES, 1.0),
    ("", "Date", CLASSES, 0.0),
    ("date", "Date", CLASSES, 0.0),  # case counts
    ("It is a Date.", "Date", CLASSES, 1.0),
    ("City", "Date", CLASSES, 0.0),
    ("Date or City", "Date", CLASSES, 0.5),
    ("Date City Other location", "Date", CLASSES, 0.25),  # "location" is named in "Other location"
    ("Other location", "Other location", CLASSES, 1.0),  # "location" is a proper part of the answer and goes
    ("Other location", "location", CLASSES, 0.5),  # the longer name stays
    ("nothing", "Date", CLASSES, 0.0),
    # Removing "a" while walking skips "ab", a proper part too, which therefore stays: 2 are left of 3.
    ("abc", "abc", ["a", "ab", "abc"], 0.5),
    # "a" goes and "abc" is skipped, then "ab" is looked at and goes.
    ("abc", "abc", ["a", "abc", "ab"], 1.0),
    # "a" goes, "ab" is skipped, "b" goes, "c" is skipped: ab, c and abc are left.
    ("abc", "abc", ["a", "ab", "b", "c", "abc"], 1 / 3),
    # A class listed twice: both are named; the first goes, the second is skipped.
    ("abc", "abc", ["a", "a", "abc"], 0.5),
    ("abc", "abc", ["abc", "a"], 1.0),
    ("体育新闻", "体育新闻", ["体育", "体育新闻"], 1.0),
]

RETRIEVAL = [
    ("Paragraph 7", "Paragraph 7", 1.0),
    ("7", "Paragraph 7", 1.0),
    ("", "Paragraph 7", 0.0),
    ("Paragraph", "Paragraph 7", 0.0),
    ("Paragraph 7 or 8", "Paragraph 7", 0.5),
    ("7, 7 and 3", "Paragraph 7", 2 / 3),
    ("17", "Paragraph 7", 0.0),  # whole numbers are compared
    ("07", "Paragraph 7", 0.0),  # as digits
    ("段落12", "段落12", 1.0),
    ("段落12和段落3", "段落3", 0.5),
]

COUNT = [
    ("5", "5", 1.0),
    ("", "5", 0.0),
    ("five", "5", 0.0),
    ("5 of 20", "5", 0.5),
    ("5.0", "5", 0.5),  # two numbers: 5 and 0
    ("5 5 5", "5", 1.0),
    ("15", "5", 0.0),
]

CODE = [
    ("return x", "return x", 1.0),
    ("", "return x", 0.0),
    ("return x", "", 0.0),
    ("", "", 1.0),
    ("# only\n// comments\n```", "return x", 0.0),
    ("# only comments", "", 1.0),  # no line of code is the empty text
    ("# a comment\nreturn x", "return x", 1.0),
    ("```python\nreturn x\n```", "return x", 1.0),
    ("\n\nreturn x\nmore", "return x", 1.0),
    ("  \nreturn x", "  ", 1.0),  # a line of blanks is the first line of code
    ("# a\n\nreturn x", "", 1.0),  # and so is an empty one after a comment
    ("x = 1  # one", "x = 1", 0.0),  # a line with a comment in it is no line of code
    ("x = 'http://a'", "x = 'http://a'", 0.0),
    ("abcd", "abce", 0.75),  # 2 * 3 / 8
    ("abc", "ab", 0.8),  # 2 * 2 / 5
    ("abcdef", "abc", 0.67),  # 6 / 9 in whole hundredths
    ("abc", "xyz", 0.0),
    (" x", "x", 0.67),  # leading blanks count: 2 / 3
]


@pytest.mark.parametrize(("prediction", "answer", "score"), TOKEN_F1)
def test_token_f1(prediction, answer, score):
    assert metrics.token_f1(prediction, answer) == pytest.approx(score)


@pytest.mark.parametrize(("prediction", "answer", "score"), TOKEN_F1_ZH)
def test_token_f1_zh(prediction, answer, score):
    assert metrics.token_f1_zh(prediction, answer, by_character) == pytest.approx(score)


@pytest.mark.parametrize(("prediction", "answer", "score"), ROUGE)
def test_rouge_l(prediction, answer, score):
    assert metrics.rouge_l(prediction, answer) == pytest.approx(score, abs=2e-8)


@pytest.mark.parametrize(("prediction", "answer", "classes", "score"), CLASSIFICATION)
def test_classification(prediction, answer, classes, score):
    assert metrics.classification(prediction, answer, classes) == pytest.approx(score)


@pytest.mark.parametrize(("prediction", "answer", "score"), RETRIEVAL)
def test_retrieval(prediction, answer, score):
    assert metrics.retrieval(prediction, answer) == pytest.approx(score)


@pytest.mark.parametrize(("prediction", "answer", "score"), COUNT)
def test_count(prediction, answer, score):
    assert metrics.count(prediction, answer) == pytest.approx(score)


@pytest.mark.parametrize(("prediction", "answer", "score"), CODE)
def test_code_similarity(prediction, answer, score):
    assert metrics.code_similarity(prediction, answer) == score


def test_code_similarity_keeps_difflibs_heuristic_for_frequent_characters():
    """In an answer of 200 characters, no match begins at one that makes up more than a hundredth of it."""
    assert metrics.code_similarity("z" + "x" * 198, "x" * 198 + "y") == 0.99  # 2 * 198 / 398
    assert metrics.code_similarity("z" + "x" * 199, "x" * 199 + "y") == 0.0


def test_rouge_l_overflows_as_the_authors_recursion_does():
    """A pair of sentences that takes more than 990 steps back scores 0; full stops make the pairs short."""
    words = [f"w{number}" for number in range(2000)]
    assert metrics.rouge_l(" ".join(words), " ".join(words)) == 0.0
    assert metrics.rouge_l(" ".join(words[:990]), " ".join(words[:990])) == pytest.approx(1.0)
    assert metrics.rouge_l(" ".join(words[:991]), " ".join(words[:991])) == 0.0
    with_stops = ". ".join(" ".join(words[start : start + 500]) for start in range(0, 2000, 500))
    assert metrics.rouge_l(with_stops, with_stops) == pytest.approx(1.0)
    # A long prediction is walked through too, before the short answer is reached.
    assert metrics.rouge_l("hit " + " ".join(words), "hit") == 0.0


def rouge_l_by_recursion(prediction: str, answer: str) -> float:
    """The truth: the textbook recursion, sentence by sentence, on plain lists."""

    def sentences(text):
        return [" ".join(part.split()).split(" ") for part in text.split(".") if part != ""]

    def longest(x, y):
        table = [[0] * (len(y) + 1) for _ in range(len(x) + 1)]
        for i in range(len(x)):
            for j in range(len(y)):
                table[i + 1][j + 1] = table[i][j] + 1 if x[i] == y[j] else max(table[i][j + 1], table[i + 1][j])

        def back(i, j):
            if i == 0 or j == 0:
                return set()
            if x[i - 1] == y[j - 1]:
                return back(i - 1, j - 1) | {x[i - 1]}
            return back(i - 1, j) if table[i - 1][j] > table[i][j - 1] else back(i, j - 1)

        return back(len(x), len(y))

    predicted, wanted = sentences(prediction), sentences(answer)
    if not predicted or not wanted:
        return 0.0
    common = set().union(*(longest(x, y) for x in wanted for y in predicted))
    p, r = len(common) / len(set(sum(predicted, []))), len(common) / len(set(sum(wanted, [])))
    return 2 * p * r / (p + r + 1e-8)


def test_rouge_l_equals_the_recursion_on_random_texts():
    """Few different words and many stops: ties between subsequences, repeated words and empty sentences abound."""
    draw = random.Random(0)
    for _ in range(200):
        texts = [
            "".join(draw.choice(["a ", "b ", "c ", "d ", ". ", "."]) for _ in range(draw.randint(0, 30))) for _ in "xy"
        ]
        assert metrics.rouge_l(*texts) == pytest.approx(rouge_l_by_recursion(*texts), abs=1e-12), texts


def test_classification_equals_removing_from_the_list_walked_over():
    draw = random.Random(0)
    names = ["a", "b", "ab", "bc", "abc", "c", "abcd", "d"]
    for _ in range(300):
        classes = draw.choices(names, k=draw.randint(1, 7))
        prediction, answer = draw.choice(names), draw.choice(names)
        named = [name for name in classes if name in prediction]
        for name in named:
            if name in answer and name != answer:
                named.remove(name)
        expected = 1 / len(named) if answer in named else 0
        assert metrics.classification(prediction, answer, classes) == expected


def test_a_chinese_rouge_is_that_of_the_spaced_words():
    # Words 今 天 晴 against 今 天 雨: 2 of 3 and 2 of 3; the Chinese full stop ends no sentence.
    assert metrics.rouge_l_zh("今天晴", "今天雨", by_character) == pytest.approx(2 / 3, abs=1e-7)
    assert metrics.rouge_l_zh("晴。", "晴", by_character) == pytest.approx(2 / 3, abs=1e-7)
    assert metrics.longbench("dureader", ["今天晴"], [["今天雨", "今天晴"]], None, by_character) == 100.0
    assert metrics.longbench("vcsum", [""], [["今天"]], None, by_character) == 0.0
    assert metrics.longbench("multifieldqa_zh", ["北京市", ""], [["北京"], ["北京"]], None, by_character) == 40.0


def test_jieba_cuts_chinese_by_default():
    assert metrics.longbench("multifieldqa_zh", ["我来到北京"], [["我来到北京。"]]) == 100.0
    assert metrics.longbench("dureader", ["我来到北京"], [["我来到北京"]]) == 100.0


def test_without_jieba_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jieba", None)
    with pytest.raises(ImportError, match=r"needs jieba: pip install 'pod-attention\[eval\]'"):
        metrics.longbench("dureader", ["x"], [["x"]])


# (dataset, prediction, answers, classes, score in percent)
SETS = [
    ("hotpotqa", "Paris", ["London", "Paris"], None, 100.0),  # the best answer counts
    ("hotpotqa", "Paris", [], None, 0.0),  # no answer at all
    ("hotpotqa", "Paris", [""], None, 0.0),
    ("hotpotqa", "Paris\nI think", ["Paris"], None, 50.0),  # all lines: 1 of 3
    ("triviaqa", "Paris\nI think", ["Paris"], None, 100.0),  # the first line
    ("triviaqa", "\n\nParis\nQuestion:", ["Paris"], None, 100.0),  # after leading newlines
    ("triviaqa", " \nParis", ["Paris"], None, 0.0),  # a blank is no newline
    ("trec", "\nDate\nCity", ["Date"], ["Date", "City"], 100.0),
    ("trec", "Date City", ["Date"], ["Date", "City"], 50.0),
    ("lsht", "体育\n农业", ["体育"], ["体育", "农业"], 100.0),
    ("samsum", "a b\nDialogue", ["a b"], None, 100.0),
    ("gov_report", "a b\nc d", ["a b c d"], None, 100.0),
    ("narrativeqa", "", ["x"], None, 0.0),
    ("qasper", "unanswerable", ["unanswerable"], None, 100.0),
    ("multifieldqa_en", "x y", ["x"], None, 66.67),
    ("2wikimqa", "x", ["x y"], None, 66.67),
    ("musique", "the x", ["x"], None, 100.0),
    ("qmsum", "", [""], None, 0.0),
    ("multi_news", "a b c d", ["a x b y"], None, 50.0),
    ("passage_count", "3 or 4", ["3"], None, 50.0),
    ("passage_retrieval_en", "Paragraph 3", ["Paragraph 3"], None, 100.0),
    ("passage_retrieval_zh", "段落3", ["段落3"], None, 100.0),
    ("lcc", "# c\nabcd", ["abce"], None, 75.0),
    ("repobench-p", "", [""], None, 100.0),
    ("lcc_e", "abcd", ["abce"], None, 75.0),
]


@pytest.mark.parametrize(("dataset", "prediction", "answers", "classes", "score"), SETS)
def test_longbench(dataset, prediction, answers, classes, score):
    assert metrics.longbench(dataset, [prediction], [answers], classes) == score


def test_a_score_is_the_rounded_mean_over_samples():
    assert metrics.longbench("hotpotqa", ["x", "x y", ""], [["x"], ["x"], ["x"]]) == 55.56  # (1 + 2/3 + 0) / 3
    assert metrics.longbench("passage_count", ["1", "2", "3"], [["1"], ["1"], ["1"]]) == 33.33


def test_longbench_e_scores_by_length():
    scores = metrics.longbench_e("hotpotqa_e", ["x", "x", "x y", "y"], [["x"]] * 4, [3999, 4000, 7999, 100])
    assert scores == {"0-4k": 50.0, "4-8k": 83.33, "8k+": None}
    assert metrics.longbench_e("hotpotqa_e", ["x"], [["x"]], [8000])["8k+"] == 100.0


def test_all_21_sets_have_a_metric():
    assert len(metrics.METRIC_OF) == 21 == sum(len(sets) for sets in metrics.METRICS.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("hotpotQA", ["x"], [["x"]]), "did you mean hotpotqa"),
        (("hotpotqa", [], []), "nothing to score"),
        (("hotpotqa", ["x"], []), "1 predictions but answers for 0"),
        (("trec", ["x"], [["x"]]), "all_classes is empty"),
        (("passage_retrieval_en", ["1"], [["1"]]), "Paragraph 7"),
    ],
)
def test_what_cannot_be_scored_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        metrics.longbench(*arguments)


# (prediction, wanted, match, score in percent)
RULER = [
    ("It is 1234567.", ["1234567"], "all", 100.0),
    ("", ["1234567"], "all", 0.0),
    ("12345678", ["1234567"], "all", 100.0),  # contained
    ("ABC def", ["abc", "DEF"], "all", 100.0),  # whatever the case
    ("abc", ["abc", "def", "ghi", "jkl"], "all", 25.0),
    ("ab\x00c", ["abc"], "all", 0.0),  # a control character is a line end
    ("a\tb", ["a b"], "all", 0.0),
    ("the answer is Paris", ["London", "paris"], "any", 100.0),
    ("Rome", ["London", "Paris"], "any", 0.0),
]


@pytest.mark.parametrize(("prediction", "wanted", "match", "score"), RULER)
def test_ruler(prediction, wanted, match, score):
    assert metrics.ruler([prediction], [wanted], match) == score


def test_ruler_is_the_mean_and_refuses_what_it_cannot_score():
    assert metrics.ruler(["a b", "a", ""], [["a", "b"]] * 3) == 50.0
    # 23 of 160 are 14.375: a quotient times 100, as the authors have it, falls just below.
    assert metrics.ruler(["a"] * 23 + [""] * 137, [["a"]] * 160) == 14.37
    for arguments, message in [(([], []), "nothing"), ((["x"], [[]]), "nothing"), ((["x"], []), "1 predictions")]:
        with pytest.raises(ValueError, match=message):
            metrics.ruler(*arguments)
    with pytest.raises(ValueError, match="'all' or 'any'"):
        metrics.ruler(["x"], [["x"]], "some")
