"""Text that others chose, shown to people."""


def plain(text: str) -> str:
    """Spelled out is what a terminal would obey, or hide: names come from engines, reasons from stores."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
