"""Valid and invalid files of every format, read by ``build-corpus``: errors name the line."""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from guidance.errors import InputError
from pipelines.stages import corpus
from pipelines.storage.store import Store


@dataclass(frozen=True)
class Case:
    name: str
    file: str
    data: bytes
    options: dict[str, Any] = field(default_factory=dict)
    texts: list[str] | None = None
    warns: str | None = None
    error: str | None = None


def parquet(column: Any, **more: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": column} | more), file, **({"row_group_size": 1} if len(column) > 400 else {}))
    return file.getvalue()


def parquet_of(**columns: Any) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def arrow(texts: list[str | None], *, stream: bool = True) -> bytes:
    table = pa.table({"text": texts})
    file = io.BytesIO()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()


def words(*rows: str) -> bytes:
    """CoNLL-U from ``id form head`` triples; the rest is underscores."""
    lines = []
    for row in rows:
        id_, form, head = row.split()
        lines.append("\t".join([id_, form, "_", "_", "_", "_", head, "root" if head == "0" else "dep", "_", "_"]))
    return ("\n".join(lines) + "\n\n").encode()


TREE = words("1 He 2", "2 ran 0")
PARQUET = parquet(["One.", "Two."])
BAD_STRING = pa.StringArray.from_buffers(
    1, pa.py_buffer(b"\x00\x00\x00\x00\x02\x00\x00\x00"), pa.py_buffer(b"\xff\xfe")
)

NESTED = parquet_of(a=[{"b": "One.", "i": 7, "x": 0}, None, {"b": "Two.", "i": 8, "x": 0}])

CASES = [
    # E1, E2, E3
    Case("empty file", "a.txt", b"", error="no records in 'a.txt'"),
    Case("blank lines only", "a.txt", b"\n \n\t\n", error="no records"),
    Case("empty jsonl", "a.jsonl", b"", error="no records"),
    Case("header only", "a.csv", b"id,text\n", error="no records"),
    Case("zero rows", "a.parquet", parquet(pa.array([], pa.string())), error="no records"),
    Case("comments only", "a.conllu", b"# newdoc id = x\n\n# text = y\n", error="no records in 'a.conllu'"),
    Case("white records only", "a.jsonl", b'{"text": " "}\n', error="no records in 'a.jsonl': 1 empty"),
    Case("blank lines between", "a.jsonl", b'{"text": "A."}\n\n{"text": "B."}', texts=["A.", "B."]),
    Case("no final newline", "a.txt", b"A.\n\nB.", texts=["A.", "B."]),
    Case("wrapped lines", "a.txt", b"A b\n  c.  \n\n\nD.\n", texts=["A b c.", "D."]),
    Case("crlf", "a.txt", b"A b\r\nc.\r\n\r\nB.\r\n", texts=["A b c.", "B."]),
    Case("cr only", "a.txt", b"A.\r\rB.\r", texts=["A.", "B."]),
    Case("mixed line ends", "a.txt", b"A.\r\n\nB.\r\rC.", texts=["A.", "B.", "C."], warns="line ends"),
    # E4
    Case("mark at the start", "a.txt", b"\xef\xbb\xbfA.", texts=["A."]),
    Case("mark inside", "a.txt", "A \ufeffb.".encode(), texts=["A \ufeffb."], warns="byte-order mark"),
    Case("mark before a header", "a.csv", b"\xef\xbb\xbftext,id\nA.,x\n", texts=["A."]),
    # E5
    Case("utf-16", "a.txt", "Hello".encode("utf-16"), error="'a.txt': looks like UTF-16, line 1, byte 0"),
    Case("utf-16 asked for", "a.txt", "Hé\r\nllo".encode("utf-16"), {"encoding": "utf-16"}, texts=["Hé llo"]),
    Case("latin-1", "a.txt", b"one\ntwo\ncaf\xe9 three\n", error="'a.txt', line 3, byte 11"),
    Case("latin-1 asked for", "a.txt", b"caf\xe9", {"encoding": "latin-1"}, texts=["café"]),
    Case("latin-1 after cr", "a.txt", b"one\r\rcaf\xe9", error="line 3, byte 8"),
    Case("mixed encodings", "a.jsonl", '{"text": "é"}\n'.encode() + b'{"text": "\xe9"}\n', error="line 2, byte 25"),
    Case("cut character", "a.txt", b"A.\nB \xe2\x82", error="line 2, byte 5"),
    Case("overlong", "a.txt", b"A\n\xc0\xaf", error="line 2, byte 2"),
    Case("encoded surrogate", "a.txt", b"A\n\nB\xed\xa0\x80", error="line 3, byte 4"),
    Case("far into the file", "a.txt", b"x" * 2_000_000 + b"\nab\xff", error="line 2, byte 2000003"),
    Case("unknown encoding", "a.txt", b"A", {"encoding": "klingon"}, error="unknown encoding 'klingon'"),
    Case("encoding of host names", "a.txt", b"A\xff", {"encoding": "idna"}, error="unknown encoding 'idna'"),
    Case(
        "half a pair", "a.txt", b"A\nB +2AA- C", {"encoding": "utf-7"}, error="'a.txt', from line 1, byte 0: not utf-7"
    ),
    Case("half a pair, escaped", "a.txt", b"\\ud800", {"encoding": "unicode_escape"}, error="half of a surrogate pair"),
    Case("no text encoding", "a.txt", b"A", {"encoding": "hex"}, error="unknown encoding 'hex'"),
    # E6, E7, E9, E12
    Case("control characters", "a.txt", b"A\x00b \x1b[31mc.", texts=["A\x00b \x1b[31mc."], warns="control"),
    Case(
        "odd separators",
        "a.txt",
        "a\u2028b\x85c\x0bd\x0ce\x1cf.".encode(),
        texts=["a\u2028b\x85c\x0bd\x0ce\x1cf."],
        warns="control",
    ),
    Case("odd separators in jsonl", "a.jsonl", '{"text": "a\u2028b\u0085c."}\n'.encode(), texts=["a\u2028b\x85c."]),
    Case("invisible", "a.txt", "\u200b\u200d".encode(), texts=["\u200b\u200d"], warns="invisible"),
    Case("white", "a.jsonl", '{"text": "\u2003\u3000"}\n{"text": "A."}'.encode(), texts=["A."], warns="empty"),
    Case("nfd", "a.txt", b"cafe\xcc\x81", texts=["café"]),
    Case("markup", "a.txt", b"<b>{{x}}</b> [MASK] </s> =1+1", texts=["<b>{{x}}</b> [MASK] </s> =1+1"]),
    # E11
    Case("one token", "a.txt", b"A", texts=["A"]),
    Case("all equal", "a.jsonl", b'{"text": "A."}\n' * 9, texts=["A."], warns="8 dropped as duplicate"),
    # E13
    Case("gzip as text", "a.txt", gzip.compress(b"A"), error="looks like gzip"),
    Case("text as gzip", "a.txt.gz", b"A", error="not gzip; it looks like plain text"),
    Case("parquet as text", "a.txt", PARQUET, error="looks like Parquet"),
    Case("parquet as jsonl", "a.jsonl", PARQUET, error="looks like Parquet"),
    Case("parquet in gzip", "a.csv.gz", gzip.compress(PARQUET), error="looks like Parquet"),
    Case("text as parquet", "a.parquet", b"A long enough text. " * 9, error="not Parquet"),
    Case("gzip as parquet", "a.parquet", gzip.compress(b"A"), error="looks like gzip"),
    Case("zip as text", "a.txt", b"PK\x03\x04rest", error="a zip archive"),
    Case("picture as text", "a.txt", b"\x89PNG\r\n\x1a\n", error="a PNG image"),
    Case("gzipped text", "a.txt.gz", gzip.compress(b"A.\n\nB."), texts=["A.", "B."]),
    Case("two gzip members", "a.txt.gz", gzip.compress(b"A.\n") + gzip.compress(b"B."), texts=["A. B."]),
    Case("cut gzip", "a.txt.gz", gzip.compress(b"A" * 999)[:-9], error="damaged gzip"),
    Case("damaged gzip", "a.txt.gz", gzip.compress(b"A" * 999)[:-8] + b"x" * 8, error="damaged gzip"),
    # E14, E15, E16
    Case("cut line", "a.jsonl", b'{"text": "A."}\n{"text": "B', error="'a.jsonl', line 2: not JSON"),
    Case("missing field", "a.jsonl", b'{"text": "A."}\n\n{"txt": "B"}', error="line 3: no field 'text'; it has 'txt'"),
    Case("wrong type", "a.jsonl", b'{"text": 7}', error="line 1"),
    Case("array", "a.jsonl", b'["A"]', error="line 1: expected a JSON object, found list"),
    Case("pretty-printed", "a.jsonl", b'{\n  "text": "A"\n}', error="line 1: not JSON"),
    Case("deep", "a.jsonl", b'{"text": "A."}\n' + b"[" * 100_000, error="line 2: nested too deeply"),
    Case(
        "long number",
        "a.jsonl",
        b'{"text": "A", "n": ' + b"1" * 5000 + b"}",
        error="not JSON (a number has too many digits)",
    ),
    Case("NaN", "a.jsonl", b'{"text": "A", "n": NaN}', error="line 1: not JSON (NaN"),
    Case("unpaired surrogate", "a.jsonl", b'{"text": "A."}\n{"text": "B \\ud800"}', error="line 2: unpaired surrogate"),
    Case("unpaired surrogate as id", "a.jsonl", b'{"text": "B", "id": "\\udc00"}', error="line 1: unpaired surrogate"),
    Case("repeated id", "a.jsonl", b'{"text":"A","id":"x"}\n{"text":"B","id":"x"}', error="line 2: duplicate id 'x'"),
    Case("number and string id", "a.jsonl", b'{"text":"A","id":1}\n{"text":"B","id":"1"}', texts=["A", "B"]),
    Case("null text", "a.jsonl", b'{"text": null}\n{"text": "A."}', texts=["A."], warns="1 dropped as null text"),
    Case("id of a bad type", "a.jsonl", b'{"text": "A", "id": [1]}', error="line 1: id 'id'"),
    Case("other fields", "a.jsonl", b'{"t": "A", "k": 3}', {"text_field": "t", "id_field": "k"}, texts=["A"]),
    Case(
        "look-alikes",
        "a.csv",
        b"id,text\n007,2020-01-01 00:00:00\n08,NA\n09,null\n10,007\n11,1e5\n",
        texts=["2020-01-01 00:00:00", "NA", "null", "007", "1e5"],
    ),
    Case("json look-alikes", "a.jsonl", b'{"text": "007"}\n{"text": "null"}', texts=["007", "null"]),
    # E17
    Case(
        "hostile ids",
        "a.jsonl",
        b"".join(
            json.dumps({"id": i, "text": i + "!"}).encode() + b"\n" for i in ("../../x", "CON", "x" * 300, "a\0b")
        ),
        texts=["../../x!", "CON!", "x" * 300 + "!", "a\0b!"],
        warns="control",
    ),
    # E18
    Case("open quote", "a.csv", b'text\nA\n"B\nC\n', error="'a.csv', line 3"),
    Case("ragged", "a.csv", b"id,text\n1,A\n2\n", error="line 3: 1 field, the header has 2"),
    Case("wrong delimiter", "a.csv", b"id;text\n1;A\n", error="no column 'text'"),
    Case(
        "a space after a name", "a.csv", b"id,text \n1,A\n", error="the header has 'id', 'text '; did you mean 'text '?"
    ),
    Case("duplicate header", "a.csv", b"text,text\nA,B\n", error="line 1: the header repeats columns"),
    Case("200 kB field", "a.csv", b'text\n"' + b"ab " * 70_000 + b'"\n', warns="was cut"),
    Case("quoted newline", "a.csv", b'id,text\n1,"A ""b""\nc, d."\n2,E.\n', texts=['A "b" c, d.', "E."]),
    Case("late ragged row", "a.csv", b'text,x\n"A\nB",1\nC\n', error="line 4: 1 field,"),
    Case("plain tsv", "a.tsv", b'text\tid\nHe said "A\t1\n', texts=['He said "A']),
    Case("quoted tsv", "a.tsv", b'text\tid\n"A\tb"\t1\n', {"quoting": True}, texts=["A\tb"]),
    Case("tsv with too many fields", "a.tsv", b"text\nA\tB\n", error="line 2: 2 fields"),
    # E19
    Case("parquet", "a.parquet", PARQUET, texts=["One.", "Two."]),
    Case("large strings", "a.parquet", parquet(pa.array(["A", None], pa.large_string())), texts=["A"], warns="null"),
    Case("dictionary", "a.parquet", parquet(pa.array(["A", "B", "A"]).dictionary_encode()), texts=["A", "B"]),
    Case(
        "500 row groups", "a.parquet", parquet([f"T {i}." for i in range(500)]), texts=[f"T {i}." for i in range(500)]
    ),
    Case("integers", "a.parquet", parquet([1, 2]), error="column 'text' holds int64"),
    Case("lists", "a.parquet", parquet([["A"]]), error="holds list"),
    Case("bytes", "a.parquet", parquet([b"A"]), error="holds binary"),
    Case("invalid utf-8", "a.parquet", parquet(BAD_STRING), error="'a.parquet', row 1: not UTF-8"),
    Case("no such column", "a.parquet", parquet(["A"]), {"text_field": "body"}, error="no column 'body'"),
    Case("integer ids", "a.parquet", parquet(["A", "B"], id=[1, 1]), error="row 2: duplicate id '1'"),
    Case("nested field", "a.jsonl", b'{"a": {"b.c": {"d": "A."}}}', {"text_field": "a.b.c.d"}, texts=["A."]),
    Case("field with a dot", "a.jsonl", b'{"a.b": "A.", "a": {"b": "B."}}', {"text_field": "a.b"}, texts=["A."]),
    Case("nested id", "a.jsonl", b'{"text": "A", "m": {"i": 1}}', {"id_field": "m.i"}, texts=["A"]),
    Case("no nested field", "a.jsonl", b'{"a": {"b": "A."}}', {"text_field": "a.c"}, error="line 1: no field 'a.c'"),
    Case("field in a string", "a.jsonl", b'{"a": "A."}', {"text_field": "a.c"}, error="line 1: no field 'a.c'"),
    Case("null above", "a.jsonl", b'{"a": null}', {"text_field": "a.c"}, error="line 1: no field 'a.c'"),
    Case("struct", "a.parquet", NESTED, {"text_field": "a.b", "id_field": "a.i"}, texts=["One.", "Two."], warns="null"),
    Case("struct as text", "a.parquet", NESTED, {"text_field": "a"}, error="column 'a' holds struct"),
    Case("no field in a struct", "a.parquet", NESTED, {"text_field": "a.c"}, error="no column 'a.c'"),
    Case("arrow stream", "a.arrow", arrow(["One.", None]), texts=["One."], warns="null"),
    Case("arrow file", "a.arrow", arrow(["One.", "Two."], stream=False), texts=["One.", "Two."]),
    Case("cut arrow", "a.arrow", arrow(["One."] * 99)[:-300], error="'a.arrow', after row 0: damaged Arrow"),
    Case("arrow without text", "a.arrow", arrow(["One."]), {"text_field": "body"}, error="no column 'body'"),
    Case("text as arrow", "a.arrow", b"A long text.", error="'a.arrow': not Arrow; it looks like plain text"),
    Case("cut parquet", "a.parquet", PARQUET[:-20], error="damaged Parquet"),
    # E20
    Case("conllu", "a.conllu", TREE, texts=["He ran"]),
    Case("9 columns", "a.conllu", TREE + b"\t".join([b"1", *[b"_"] * 8]), error="line 4: 9 columns"),
    Case("spaces", "a.conllu", b"1 He _ _ _ _ 0 root _ _\n", error="line 1: 1 column,"),
    Case("head out of range", "a.conllu", words("1 a 0", "2 b 3"), error="line 2: head 3"),
    Case("cycle", "a.conllu", words("1 a 0", "2 b 3", "3 c 4", "4 d 2"), error="cycle"),
    Case("own head", "a.conllu", words("1 a 0", "2 b 2"), error="line 2: word 2 is its own head"),
    Case("two roots", "a.conllu", words("1 a 0", "2 b 0"), error="line 2: two roots"),
    Case("no root", "a.conllu", words("1 a 2", "2 b 1"), error="line 1: no root"),
    Case("repeated word number", "a.conllu", words("1 a 0", "1 b 1"), error="line 2: expected word number 2, found 1"),
    Case("gap", "a.conllu", words("1 a 0", "3 b 1"), error="line 2: expected word number 2, found 3"),
    Case("letters for a head", "a.conllu", words("1 a x"), error="line 1: head 'x'"),
    Case("some heads", "a.conllu", words("1 a 0", "2 b _"), error="line 2: head '_'"),
    # E21
    Case(
        "multi-word token and empty node",
        "a.conllu",
        words("1-2 vámonos _", "1 vamos 0", "2 nos 1", "2.1 X _", "3 ya 1"),
        texts=["vámonos ya"],
    ),
    Case("no heads", "a.conllu", words("1 a _", "2 b _"), texts=["a b"]),
    Case("600 words", "a.conllu", words("1 w 0", *(f"{i} w 1" for i in range(2, 601))), texts=[" ".join("w" * 600)]),
    Case("no last blank line", "a.conllu", TREE.rstrip(), texts=["He ran"]),
    Case("crlf conllu", "a.conllu", TREE.replace(b"\n", b"\r\n"), texts=["He ran"]),
    Case("text given", "a.conllu", b"# text = He  ran\n" + TREE, texts=["He  ran"]),
    Case("text mismatch", "a.conllu", b"# text = She ran\n" + TREE, texts=["He ran"], warns="does not match"),
    Case("broken range", "a.conllu", words("2-3 ab _", "1 a 0"), error="line 1: multi-word token 2-3"),
    Case("range past the end", "a.conllu", words("1-2 ab _", "1 a 0"), error="line 2"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_file_is_read_or_refused_as_it_should_be(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "in" / case.file
    path.parent.mkdir()
    path.write_bytes(case.data)
    store = Store(tmp_path / "store")
    config = corpus.Config(**{"sentences": "line", "valid": 0.0} | case.options)
    if case.error:
        with pytest.raises(InputError) as caught:
            corpus.run([str(path)], config, store=store)
        message = caught.value.message
        assert case.error in message
        assert len(message) < 1000 and message.isprintable()
        assert not list(store.root.glob("corpus/*")) and not list(store.root.glob(".tmp/*"))
        return
    result = corpus.run([str(path)], config, store=store)
    rows = pq.read_table(result.artifact.path / "blocks.parquet").to_pylist()
    if case.texts is not None:
        assert [row["text"] for row in rows] == case.texts
    warnings = " ".join(result.artifact.manifest["warnings"])
    assert (case.warns in warnings) if case.warns else not warnings or "duplicate" in warnings
    assert warnings.isprintable()


def test_the_errors_of_a_record_do_not_depend_on_the_chunk_they_fall_in(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for size in (2**20 - 1, 2**20, 2**20 + 1):
        path.write_bytes(b"x\n" + b"y" * (size - 2) + "é".encode() + b"\xe9 z")
        with pytest.raises(InputError, match=f"line 2, byte {size + 2}"):
            corpus.run([str(path)], corpus.Config(sentences="line"), store=Store(tmp_path / "store"))


def test_damaged_parquet_raises_only_input_errors(tmp_path: Path) -> None:
    import random

    random.seed(0)
    good = parquet([f"Sentence number {i}." for i in range(50)], id=list(range(50)))
    config, store = corpus.Config(sentences="line"), Store(tmp_path / "store")
    path = tmp_path / "a.parquet"
    messages = []
    for _ in range(60):
        data = bytearray(good)
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        path.write_bytes(bytes(data[: random.choice([len(data), len(data), random.randrange(len(data))])]))
        try:
            corpus.run([str(path)], config, store=store)
        except InputError as error:
            messages.append(error.message)
    assert len(messages) > 20
    assert all("a.parquet" in message or "no records" in message for message in messages)


def test_compressed_bombs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.text import readers

    monkeypatch.setattr(readers, "EXPANSION_LIMIT", 10)
    readers.check_expansion("a.gz", 1 << 30, 1 << 20)
    with pytest.raises(InputError, match="bomb"):
        readers.check_expansion("a.gz", (1 << 30) + 1, 1 << 20)
    readers.check_expansion("b.gz", 1 << 31, 1 << 30)


# valid and invalid JSON by RFC 8259, one line each
GOOD_JSON = [
    b'{"text":"\\u0041\\n\\/\\b\\f\\r\\t\\"\\\\"}',
    b' \t{ "text" : "A" } \r',
    b'{"text":"A","text":"B"}',
    b'{"text":"A","":0,"n":[1E+2,-0,0e1,1e-999,123123e100000]}',
    b'{"text":"\\uD834\\uDD1E"}',
    b'{"text":"\x7f\xf4\x8f\xbf\xbf\xef\xbf\xbe"}',
    b'{"text":"A","n":[[[]],{},null,true,false]}',
    b'{"text":"A","id":"\\u0000"}',
]
BAD_JSON = [
    b'{"text":"A",}',
    b'{"text":"A"}}',
    b'{"text":"A"} {"text":"B"}',
    b'{"text":"A"}#',
    b"{'text':'A'}",
    b'{text:"A"}',
    b'{"text":"A" "n":1}',
    b'{"text"::"A"}',
    b'{"text":"A","n":01}',
    b'{"text":"A","n":+1}',
    b'{"text":"A","n":.5}',
    b'{"text":"A","n":1.}',
    b'{"text":"A","n":0x1F}',
    b'{"text":"A","n":Infinity}',
    b'{"text":"A","n":-NaN}',
    b'{"text":"A","n":[1,]}',
    b'{"text":"A","n":[,1]}',
    b'{"text":"A","n":tru}',
    b'{"text":"A","n":\xef\xbc\x91}',
    b'{"text":"\\x41"}',
    b'{"text":"\\u00G0"}',
    b'{"text":"\\u004"}',
    b'{"text":"A\tB"}',
    b'{"text":"A\x00B"}',
    b'{"text":"A',
    b'{"text":"A\\',
    b'{"text":"\\uD800\\n"}',
    b'{"text":"\\uDD1E\\uD834"}',
    b'{"text":"\xff"}',
    b'{"text":"\xed\xa0\x80"}',
    b'{"text":"A"\xe2\x80\x8b}',
    b'{"text":"A"}\xc2\xa0',
    b'{"text":{"text":"A"}}',
    b'{"text":true}',
    b'"A"',
    b"nan",
    b"1",
    b"\xef\xbb\xbf\xef\xbb\xbf{}",
    b'{"n":' * 3000 + b"1" + b"}" * 3000,
]


def json_verdict(line: bytes, tmp_path: Path) -> str | None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text":"first"}\n' + line + b"\n")
    try:
        corpus.run([str(tmp_path / "a.jsonl")], corpus.Config(sentences="line"), store=Store(tmp_path / "store"))
    except InputError as error:
        return error.message
    return None


@pytest.mark.parametrize("line", GOOD_JSON, ids=str)
def test_what_the_standard_allows_is_read(line: bytes, tmp_path: Path) -> None:
    assert json_verdict(line, tmp_path) is None


@pytest.mark.parametrize("line", BAD_JSON, ids=lambda line: str(line[:40]))
def test_what_the_standard_forbids_is_refused_with_its_line(line: bytes, tmp_path: Path) -> None:
    message = json_verdict(line, tmp_path)
    assert message and "line 2" in message and message.isprintable()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("suffix", ["txt", "jsonl", "csv", "tsv", "parquet", "conllu", "txt.gz"])
def test_every_reader_reads_or_refuses_every_file(suffix: str, tmp_path: Path) -> None:
    store, path = Store(tmp_path / "store"), tmp_path / f"a.{suffix}"
    messages = []
    for case in CASES:
        if len(case.data) > 1 << 20 or case.name == "500 row groups":
            continue
        path.write_bytes(case.data)
        try:
            corpus.run([str(path)], corpus.Config(sentences="line", valid=0.0), store=store)
        except InputError as error:
            messages.append(error.message)
    assert len(messages) > 10
    assert all(len(message) < 1000 and message.isprintable() for message in messages)


@pytest.mark.parametrize(
    ("name", "data", "hint"),
    [
        ("a.jsonl", b'{"id": "7", "body": {"main": "A long text.", "title": "T"}}', "--text-field body.main"),
        ("a.csv", b"id,body\n1,A long text.\n", "--text-field body"),
        ("a.csv", b"url,body\nhttps://example.org/of/some/length,A text.\n", "--text-field body"),
        ("a.parquet", parquet_of(id=[1], body=["A long text."]), "--text-field body"),
        ("b.parquet", parquet_of(id=[1], body=[{"main": "A."}]), "--text-field body.main"),
    ],
)
def test_columns_that_hold_text_are_suggested(name: str, data: bytes, hint: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(InputError, match=r"no (field|column) 'text'") as caught:
        corpus.run([str(tmp_path / name)], corpus.Config(), store=Store(tmp_path / "store"))
    assert hint in (caught.value.hint or "")


def test_folders_that_datasets_saves_are_read(tmp_path: Path) -> None:
    for split, text in (("train", "One."), ("test", "Two.")):
        folder = tmp_path / "saved" / split
        folder.mkdir(parents=True)
        (folder / "data-00000-of-00001.arrow").write_bytes(arrow([text]))
        (folder / "cache-0123456789abcdef.arrow").write_bytes(arrow(["Cached."]))
        (folder / "dataset_info.json").write_text("{}")
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    result = corpus.run([str(tmp_path / "saved")], corpus.Config(valid=0.0), store=Store(tmp_path / "store"))
    assert result is not None
    found = pq.read_table(result.artifact.path / "documents.parquet")["source"].to_pylist()
    assert found == ["test/data-00000-of-00001.arrow", "train/data-00000-of-00001.arrow"]
    assert result.artifact.counts["sentences"] == 2


def test_a_path_that_cannot_be_read_says_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("A.")
    for given, hint in (("nots.txt", "did you mean"), ("other.txt", "patterns such as 'text/*.txt'")):
        with pytest.raises(InputError, match=f"{given}': cannot be read") as caught:
            corpus.run([str(tmp_path / given)], corpus.Config(), store=Store(tmp_path / "store"))
        assert hint in (caught.value.hint or "")


TAGGED = b"".join(b"The O\nWolof B-LANG\npeople O\n. O\n\n" for _ in range(9))
COLUMNS = [
    ("tabs and tags", TAGGED.replace(b" ", b"\t"), "one token with 2 columns"),
    ("spaces and tags", TAGGED, "one token with 2 columns"),
    ("four columns", TAGGED.replace(b" O", b" X X O").replace(b" B", b" X X B"), "one token with 4 columns"),
    ("blank lines with tabs", TAGGED.replace(b" ", b"\t").replace(b"\n\n", b"\n\t\n"), "one token with 2 columns"),
    ("treebank", TREE * 12, "one token with 10 columns"),
    ("treebank with comments", (b"# text = He ran\n" + TREE) * 12, "one token with 10 columns"),
    ("pairs", b"".join(b"He ran home.\tEl corri\xc3\xb3 a casa.\n" for _ in range(30)), None),
    ("two words", b"one two\n\n" * 30, None),
]


@pytest.mark.parametrize(("name", "data", "error"), COLUMNS, ids=[name for name, *_ in COLUMNS])
def test_tokens_in_columns_are_not_read_as_prose(name: str, data: bytes, error: str | None, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    store = Store(tmp_path / "store")
    if error is None:
        assert corpus.run([str(path)], corpus.Config(), store=store) is not None
        return
    with pytest.raises(InputError, match=f"'a.txt': not running text: {error}") as caught:
        corpus.run([str(path)], corpus.Config(), store=store)
    assert ("--format conllu" if "10" in error else "awk") in (caught.value.hint or "")
    assert corpus.run([str(path)], corpus.Config(format="text"), store=store) is not None
