"""Inline PTX in preprocessed CUDA C++ to calls of the functions in ptx.h, one statement of PTX at a time."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

HERE = Path(__file__).parent

_ASM = re.compile(r"\basm(\s+volatile)?\s*\(")
_DYNAMIC = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")
_STATIC = re.compile(r"__shared__ (?:__align__\(\d+\) )?(\w+) (\w+)((?:\[[^\]]*\])+);")
_STATEMENT = re.compile(
    r"(?:(?P<label>\w+):\s)?\s*(?:@(?P<guard>!?\w+)\s+)?(?P<opcode>[\w.:]+)\s*(?P<operands>.*)", re.S
)
_REGISTER_TYPES = {".pred": "bool", ".b32": "unsigned int"}


class UnknownInstruction(Exception):
    """PTX that the emulated GPU does not have; the message names it."""


def translate(source: str) -> str:
    """Return preprocessed CUDA C++ as C++ for `machine.h`. Raises UnknownInstruction.

    Operands are put into the calls as they are written, so that an instruction can keep references to its registers;
    they must have no side effects.
    """
    source = _DYNAMIC.sub(r"\1 *const \2 = (\1 *)machine::dynamic_shared();", source)
    source = _STATIC.sub(r"auto &\2 = machine::shared_variable<\1\3, __LINE__>();", source)
    translated, at = [], 0
    while found := _ASM.search(source, at):
        end = _closing(source, found.end() - 1)
        assert source[end + 1] == ";", "inline PTX is a statement"
        translated += [source[at : found.start()], _block(source[found.end() : end], f"{len(translated)}")]
        at = end + 2
    return "".join([*translated, source[at:]])


def _block(asm: str, number: str) -> str:
    """Return the C++ block for the inside of one asm(...)."""
    text, *operands = _split(asm, ":")
    ptx = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', text)).replace("\\n", " ").strip()
    if ptx.startswith("{ .reg"):
        ptx = ptx[1:].rstrip("}")
    values = [_expression(operand) for section in operands[:2] for operand in _split(section, ",") if operand.strip()]
    registers: set[str] = set()
    statements = [_statement(s.strip(), values, registers, number) for s in ptx.split(";") if s.strip()]
    return "{ " + " ".join(statements) + " }"


def _statement(statement: str, values: list[str], registers: set[str], number: str) -> str:
    found = _STATEMENT.fullmatch(statement)
    assert found, statement
    label, guard, opcode, text = found.group("label", "guard", "opcode", "operands")
    operands = [operand.strip() for operand in re.sub(r"[\[\]{}]", "", text).split(",")]
    if opcode == ".reg":
        kind, first = operands[0].split()
        names = [first, *operands[1:]]
        registers.update(names)
        return f"{_REGISTER_TYPES[kind]} {', '.join(f'register_{name}' for name in names)};"
    if opcode == "bra":
        call = f"goto {operands[0]}_{number};"
    else:
        call = f"ptx::{_function(opcode)}({', '.join(_operands(operands, values, registers))});"
    if guard:
        call = f"if ({'!' if guard[0] == '!' else ''}register_{guard.lstrip('!')}) {call}"
    return f"{label}_{number}: {call}" if label else call


def _operands(operands: list[str], values: list[str], registers: set[str]) -> list[str]:
    """Return C++ for operands of PTX: those of the asm statement, its registers and numbers; `_` is left out."""
    kept = [operand for operand in operands if operand not in ("", "_")]
    return [
        f"({values[int(operand[1:])]})"
        if operand.startswith("%")
        else f"register_{operand}"
        if operand in registers
        else operand
        for operand in kept
    ]


def _function(opcode: str) -> str:
    """Return the name of the function that is an instruction; wgmma's number of columns is that of its operands."""
    name = re.sub(r"[.:]+", "_", re.sub(r"\.m64n\d+k16\.", ".", opcode))
    if name not in _known():
        raise UnknownInstruction(f"PTX instruction {opcode} is not in {HERE.name}/ptx.h")
    return name


@lru_cache(maxsize=1)
def _known() -> frozenset[str]:
    return frozenset(re.findall(r"^inline void (\w+)\(", (HERE / "ptx.h").read_text(encoding="utf-8"), re.M))


def _expression(operand: str) -> str:
    """Return the C++ of one operand, `"=r"(expression)`."""
    return operand[operand.index("(") + 1 : operand.rindex(")")].strip()


def _closing(text: str, at: int) -> int:
    """Return where the bracket at `at` closes; brackets in string literals do not count."""
    depth = 0
    for found in re.compile(r'"(?:[^"\\]|\\.)*"|[()]').finditer(text, at):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if not depth:
            return found.start()
    raise AssertionError("an asm statement does not end")


def _split(text: str, separator: str) -> list[str]:
    """Split at separators outside of brackets and string literals."""
    parts, depth, begin = [], 0, 0
    for found in re.finditer(rf'"(?:[^"\\]|\\.)*"|[(){{}}\[\]]|{separator}', text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(found[0], 0)
        if found[0] == separator and not depth:
            parts.append(text[begin : found.start()])
            begin = found.end()
    return [*parts, text[begin:]]
