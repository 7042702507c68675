"""Server-sent events out of the bytes of a response."""

import codecs


class Events:
    """Server-sent events out of bytes in any pieces.

    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html. Fields other than event
    and data are left out; lines end with LF, CR LF or CR.
    """

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        """Pieces of a line whose end has not come."""
        self._is_first = True
        self._kind = ""
        self._data: list[str] = []

    def feed(self, data: bytes) -> list[tuple[str, str]]:
        """Take bytes; return the kind and the content of each event that they complete."""
        self._pieces.append(data)
        has_end = b"\n" in data or b"\r" in data or self._pieces[0].endswith(b"\r")
        if not has_end:
            return []
        data = b"".join(self._pieces)
        if self._is_first:
            data, self._is_first = data.removeprefix(codecs.BOM_UTF8), False
        whole = data[:-1] if data.endswith(b"\r") else data  # its \n may come with the next ones
        *lines, tail = whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._pieces = [tail + data[len(whole) :]]
        found = []
        for line in lines:
            if not line:
                if self._data or self._kind:
                    found.append((self._kind, "\n".join(self._data)))
                self._kind, self._data = "", []
                continue
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if name == b"data":
                self._data.append(value.decode(errors="replace"))
            elif name == b"event":
                self._kind = value.decode(errors="replace")
        return found
