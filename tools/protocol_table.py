"""Prints the message table of docs/protocol.md from the code; tests/unit/test_docs.py compares the two."""

import typing

import msgspec

from kvcellar.wire import messages as m

SECTIONS: dict[str, typing.Any] = {
    "From the client": m.FromClient,
    "From the server": m.FromServer,
    "Operations": m.Operation,
    "Results": m.Result,
    "The descriptor connection": m.FetchSlab | m.FetchSketch | m.DescriptorAnswer,
}


def rows(section: str) -> list[str]:
    lines = ["| message | fields | meaning |", "|---|---|---|"]
    for message in typing.get_args(SECTIONS[section]):
        fields = ", ".join(_field(field) for field in msgspec.structs.fields(message))
        # A message of more than one paragraph says the essential in the first.
        meaning = " ".join((message.__doc__ or "").split("\n\n")[0].split())
        lines.append(f"| `{message.__name__}` | {fields} | {meaning} |")
    return lines


def _field(field: msgspec.structs.FieldInfo) -> str:
    optional = field.default is not msgspec.NODEFAULT
    return f"`{field.name}`" + (f" = {field.default!r}" if optional else "")


if __name__ == "__main__":
    for title in SECTIONS:
        print(f"### {title}\n", *rows(title), "", sep="\n")
