"""MDS shards: written here from the format's description, and by the real library, and damaged."""

import base64
import bz2
import gzip
import hashlib
import json
import struct
import zlib

import numpy as np
import pytest
import xxhash

from pod.data import mds

COLUMNS = ("input_ids", "indices")

# What MDSWriter of mosaicml-streaming 0.13.0 wrote for the two samples of `samples_of_the_library`, compressed.
WRITTEN_BY_THE_LIBRARY = (
    r"c-r06^>Y(J6u|K#v{2mL!r@S$-cnqOyF)1<Bx!Rrxhs)Up}4!ddvSL!?(XjH`WxRP$4qD7FW`sI&fea>mp7Yxs}lsFVg^Bw5Rpj`l0}nZ"
    r"bK7NuMK&pBNse)f;rd9?>2ip^dQmnT9S&n+xLcB4fdT(sQD-4RViZ#?m29+IJZa2|-6+ZGE=e{^CRTq><J>NTWd8kNv&b<nYx-!Xl;nw)"
    r"-8P%AKK&Tx*=CP(Se#Btk=f;WAx0|>yV1q7X!qo`8l6_H2&dKPuP!AdShYIUpD@@YyQD_=`vrvshla2mZ*gc@15&&=r+g@g-ii|Iqth`H"
    r"bQ*7Xse_OiIZ*(`wKsoustLA`DJ@kCpP}*P^u5*L@AxvP41a{7E*hg1IwDdn2omDZ4+Ah9<1iI-uo$bb0o$<;M{pXKa1#&k9PjW|t2qmD"
    r"qYz4>oLVjd5svz3iZ<wsD3}oo2NE#|BQXKfF%L_z8k?{a2XG8$aRs;W2ruyg-_;XFHsnPS=urXH5R6)Ah~{XAt}q}PcDRs?AsCHGn27~g"
    r"j<xFlgWWiU6F84+xQi!vjZgRq`bEfr{3r$ymEea^)IkJVq650a2rCrCBL%}S7E>@Ai?9;wu?>5XhEuqR8@P{Wc#AJkKOP_C(mv7>D2plx"
    r"Kn>JG6SPJr^neL{&=(09h!Gf%X_$*8NX16%z<wOX8C=FKJj4sU$2Vj|R^&lpltOt_MG$JD0h*yLx}Ya4u)&EW48|x-)LLaemSGJxV;2tM"
    r"IL_fJ?%*+A;Uj)%eVASA!J;UwUVNyI5Y$E^v_N}wLodWYh8z7c6k{+Mv#<~=unt?X2ZwPI7jPZ-@Dy+GS-TJZhd%e*Sc32i-7xL~"
)
SHA1, XXH64 = "78b1b566c276a6b985a1cabbf651cecf7643311c", "65600e41847a2348"


def array(values):
    """An `ndarray:uint32`, byte by byte."""
    width = 0 if max(values.shape) < 2**8 else 1 if max(values.shape) < 2**16 else 2
    head = bytes([values.ndim * 4 + width]) + b"".join(n.to_bytes(1 << width, "little") for n in values.shape)
    return head + b"".join(struct.pack("<I", value) for value in values.reshape(-1).tolist())


def write_mds(folder, samples, shard_samples=2, integer="uint64", compression=None, hashes=("sha1", "xxh64")):
    """ProLong's columns, from the format's description; samples are (domain, ids, [(start, end), ...])."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for number, first in enumerate(range(0, len(samples), shard_samples)):
        rows = []
        for domain, ids, indices in samples[first : first + shard_samples]:
            parts = [domain.encode(), array(np.asarray(indices)), array(np.asarray(ids)), struct.pack("<q", len(ids))]
            rows.append(struct.pack("<3I", *map(len, parts[:3])) + b"".join(parts))
        config = json.dumps({"anything": "the reader need not look at"}).encode()
        offset, offsets = 4 + 4 * (len(rows) + 1) + len(config), []
        for row in [*rows, b""]:
            offsets.append(offset)
            offset += len(row)
        raw = struct.pack(f"<{len(rows) + 2}I", len(rows), *offsets) + config + b"".join(rows)
        name = f"shard.{number:05d}.mds"
        zipped = {"gz": gzip.compress, "bz2": bz2.compress}.get(compression, lambda raw: b"?")(raw)

        def info(name, content):
            digests = {"sha1": hashlib.sha1(content).hexdigest(), "xxh64": xxhash.xxh64(content).hexdigest()}
            return {"basename": name, "bytes": len(content), "hashes": {kind: digests[kind] for kind in hashes}}

        (folder / (f"{name}.{compression}" if compression else name)).write_bytes(zipped if compression else raw)
        shards.append(
            {
                "column_encodings": ["str", "ndarray:uint32", "ndarray:uint32", integer],
                "column_names": ["domain", "indices", "input_ids", "length"],
                "column_sizes": [None, None, None, 8],
                "compression": compression,
                "format": "mds",
                "raw_data": info(name, raw),
                "samples": len(rows),
                "version": 2,
                "zip_data": info(f"{name}.{compression}", zipped) if compression else None,
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def samples_of_the_library():
    for count, domain in ((5, "book"), (300, "é")):
        cut = count // 2
        yield domain, np.arange(count, dtype=np.uint32) * 7 % 250, np.array([[0, cut], [cut, count]], np.uint32)


def random_samples(count, seed=0, vocabulary=259, longest=700):
    """Samples of several documents each."""
    generator = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        cuts = np.unique([0, *generator.integers(1, longest, generator.integers(1, 6))])
        pairs = np.stack([cuts[:-1], cuts[1:]], axis=1).astype(np.uint32)
        ids = generator.integers(0, vocabulary, cuts[-1]).astype(np.uint32)
        samples.append((f"domain {len(samples)}", ids, pairs))
    return samples


def read(folder):
    return [sample for shard in mds.read_index(folder / "index.json") for sample in shard.samples(COLUMNS)]


def assert_same(found, samples):
    assert len(found) == len(samples)
    for (ids, indices), (_, wanted, pairs) in zip(found, samples, strict=True):
        assert ids.dtype == np.uint32 and np.array_equal(ids, wanted) and np.array_equal(indices, pairs)


@pytest.mark.parametrize("compression", [None, "gz", "bz2"])
@pytest.mark.parametrize("integer", ["uint64", "int"])
def test_round_trip(tmp_path, compression, integer):
    samples = [*random_samples(6), *random_samples(1, longest=70_000), ("", [7], [[0, 1]])]
    assert_same(read(write_mds(tmp_path, samples, 3, integer, compression)), samples)


def test_bytes_of_the_library(tmp_path):
    content = zlib.decompress(base64.b85decode("".join(WRITTEN_BY_THE_LIBRARY)))
    samples = list(samples_of_the_library())
    folder = write_mds(tmp_path, samples)
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0]["raw_data"].update(bytes=len(content), hashes={"sha1": SHA1, "xxh64": XXH64})
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "shard.00000.mds").write_bytes(content)
    assert_same(read(folder), samples)


def test_shards_of_the_library(tmp_path):
    streaming = pytest.importorskip(
        "streaming", reason="mosaicml-streaming wants transformers < 5: it is installed by hand, with --no-deps"
    )
    columns = {"domain": "str", "indices": "ndarray:uint32", "input_ids": "ndarray:uint32", "length": "int"}
    samples = random_samples(9)
    with streaming.MDSWriter(out=str(tmp_path), columns=columns, hashes=["sha1", "xxh64"], size_limit=4096) as writer:
        for domain, ids, indices in samples:
            writer.write({"domain": domain, "indices": indices, "input_ids": ids, "length": len(ids)})
    assert len(mds.read_index(tmp_path / "index.json")) > 1
    assert_same(read(tmp_path), samples)


def test_another_index_is_none(tmp_path):
    for content in ("{", "[]", '{"format": "pod-prepared"}', '{"shards": 3}'):
        (tmp_path / "index.json").write_text(content)
        assert mds.read_index(tmp_path / "index.json") is None
    for content, message in (('{"version": 3, "shards": []}', "version 3"), ('{"version": 2, "shards": [{}]}', "None")):
        (tmp_path / "index.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            mds.read_index(tmp_path / "index.json")


def test_damage_is_named(tmp_path):
    samples = random_samples(2)
    file = write_mds(tmp_path, samples) / "shard.00000.mds"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(mds.BadShard, match=rf"shard.00000.mds: {len(whole) - 1} bytes, its index says {len(whole)}"):
        read(tmp_path)
    flipped = bytearray(whole)
    flipped[-20] ^= 1
    file.write_bytes(flipped)
    with pytest.raises(mds.BadShard, match="shard.00000.mds: wrong checksum, sha1 is"):
        read(tmp_path)
    write_mds(tmp_path, samples, hashes=("xxh64",))
    file.write_bytes(flipped)
    with pytest.raises(mds.BadShard, match="wrong checksum, xxh64 is"):
        read(tmp_path)
    file.unlink()
    with pytest.raises(mds.BadShard, match="shard.00000.mds: the shard is missing"):
        read(tmp_path)


def test_any_flipped_byte_of_the_tables_is_noticed_or_harmless(tmp_path):
    """Without checksums: a shard that lies about its sizes is refused, and what is read has the shapes written."""
    samples = random_samples(2, longest=40)
    file = write_mds(tmp_path, samples, hashes=()) / "shard.00000.mds"
    whole = file.read_bytes()
    refused = 0
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 0x41
        file.write_bytes(damaged)
        try:
            found = read(tmp_path)
        except mds.BadShard:
            refused += 1
        else:
            assert [ids.shape for ids, _ in found] == [ids.shape for _, ids, _ in samples], place
    assert 12 * 4 < refused < len(whole)


def test_other_columns_and_compressions_are_refused(tmp_path):
    (shard,) = mds.read_index(write_mds(tmp_path / "a", random_samples(1)) / "index.json")
    for name in ("domain", "nothing"):
        with pytest.raises(ValueError, match=f"column '{name}' is (str|missing), wanted ndarray:uint32"):
            next(shard.samples((name,)))
    with pytest.raises(ValueError, match="compressed with 'zstd', only gz, bz2 can be read: decompress"):
        read(write_mds(tmp_path / "b", random_samples(1), compression="zstd"))
