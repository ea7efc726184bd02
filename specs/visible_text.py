"""Texts of files in messages: control characters as pictures, so that no file can steer the terminal that shows it."""

from __future__ import annotations


def visible(text: str) -> str:
    """The text with control characters as pictures, but for ends of lines."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(character if character == "\n" else _picture(character) for character in text)


def visible_line(text: str) -> str:
    """The visible text in one line: the name of a file can hold the end of one, and begin another that it forges."""
    return visible(text).replace("\n", _picture("\n"))


def _picture(character: str) -> str:
    if character.isprintable() or character == " ":
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else "\ufffd"
