import os
import subprocess
import sys
from pathlib import Path

import pytest

from nas.tasks import MQAR
from nas.training.data.tokenizer import ByteTokenizer
from nas.workload import Workload

TOKENIZER = ByteTokenizer(32)
TEXTS = [
    "", "plain ascii\n\ttabs", "Zürich, 東京, 🦉, \u0000\u007f\u0080\u00ad\u0100", "<|r3|>",
    "a<|r0|> <|r31|>b<|r3|><|r3|>", "<|r32|> <|r03|> <|r|> <|r-1|>", "".join(map(chr, range(0x250))),
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_and_equality_with_hugging_face(text: str) -> None:
    ids = TOKENIZER.encode(text)
    assert TOKENIZER.decode(ids) == text
    fast = TOKENIZER.to_hugging_face()
    assert fast(text)["input_ids"] == ids
    assert fast.decode(ids) == fast.decode(ids, skip_special_tokens=True) == text


def test_every_byte_is_its_own_id() -> None:
    fast = TOKENIZER.to_hugging_face()
    assert len(fast) == len(TOKENIZER) == 288
    for byte in range(256):
        expected = bytes([byte]).decode(errors="replace")
        assert TOKENIZER.decode([byte]) == expected
        assert fast.decode([byte]) == expected
    for code in (*range(0x800), 0xFFFF, 0x10FFFF):
        if not 0xD800 <= code < 0xE000:
            assert fast(chr(code))["input_ids"] == list(chr(code).encode())


def test_special_tokens_follow_the_bytes() -> None:
    assert TOKENIZER.encode("<|r3|>x") == [259, ord("x")]
    assert TOKENIZER.decode([256, 287]) == "<|r0|><|r31|>"
    assert ByteTokenizer.of(Workload(recall=(MQAR(keys=20, values=30),))).special_tokens == 50


def test_a_document_cannot_hold_a_special_token() -> None:
    assert TOKENIZER.encode_ordinary("<|r3|>").tolist() == list(b"<|r3|>")


@pytest.mark.parametrize("ids", [[288], [-1]])
def test_an_id_outside_the_vocabulary_is_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="allowed: 0 to 287"):
        TOKENIZER.decode(ids)


@pytest.mark.slow
def test_the_saved_folder_loads_without_our_code(tmp_path: Path) -> None:
    TOKENIZER.to_hugging_face().save_pretrained(tmp_path)
    code = (
        "import sys; sys.modules['nas'] = None\n"
        "from transformers import AutoTokenizer\n"
        f"t = AutoTokenizer.from_pretrained({str(tmp_path)!r})\n"
        "print(t('é <|r3|>')['input_ids'], t.decode([259, 65]))"
    )
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert found.stdout.strip() == "[195, 169, 32, 259] <|r3|>A"
