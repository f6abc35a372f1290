"""Values and errors of Python cells as parts of frames. Runs inside the sandbox,
in the namespace of `kernel.py` and ahead of it.
"""

from __future__ import annotations

import io

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PART_BYTES = 15 << 20  # of one result in one MIME type
TEXT_CHARS = 1 << 20
_REPRS = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_pdf_": "application/pdf",
    "_repr_latex_": "text/latex",
    "_repr_json_": "application/json",
    "_repr_javascript_": "application/javascript",
}
CHART = "application/vnd.ringfence.chart+json"
PART: str = globals().get("PART", "")  # source of another module; see `frames`
BINARY = ("image/png", "image/jpeg", "application/pdf")


def bundle_of(value: Any) -> dict[str, bytes]:
    parts: dict[str, Any] = {}
    kind = type(value)
    if hasattr(kind, "_repr_mimebundle_"):
        made = value._repr_mimebundle_()
        parts.update((made[0] if isinstance(made, tuple) else made) or {})
    if kind.__module__ == "matplotlib.figure":
        file = io.BytesIO()
        value.savefig(file, format="png", bbox_inches="tight")
        parts["image/png"] = file.getvalue()
        parts[CHART] = _chart_of(value)
    for method, mime in _REPRS.items():
        if mime not in parts and hasattr(kind, method):
            try:
                made = getattr(value, method)()
            except Exception:  # noqa: BLE001  as notebooks do: another type may work
                continue
            parts[mime] = made[0] if isinstance(made, tuple) else made
    parts.setdefault("text/plain", repr(value))
    encoded = {}
    for mime, data in list(parts.items())[:32]:
        if data is not None:
            encoded[str(mime)[:100]] = encode_value(str(mime), data)
    dropped = sum(len(data) for data in encoded.values() if len(data) > PART_BYTES)
    encoded = {mime: data for mime, data in encoded.items() if len(data) <= PART_BYTES}
    if dropped:
        encoded["text/plain"] += b"\n[%d bytes of other types are too large]" % dropped
    return encoded


def _chart_of(figure: Any) -> Any:
    """Describe a figure; None where that fails, as it does for kinds of plots that nobody foresaw."""
    names: dict[str, Any] = {"__name__": "ringfence_charts"}
    try:
        exec(compile(PART, "<ringfence charts>", "exec"), names)
        return names["chart_of"](figure)
    except Exception:  # noqa: BLE001  the picture is there
        return None


def encode_value(mime: str, data: Any) -> bytes:
    if isinstance(data, bytes):
        return data
    if mime in BINARY:
        import base64

        return base64.b64decode(data)
    if mime.endswith("json"):
        import json

        return json.dumps(data, default=str).encode()
    text = data if isinstance(data, str) else str(data)
    return (clipped(text) if mime == "text/plain" else text).encode("utf-8", "replace")


def clipped(text: str, most: int = TEXT_CHARS) -> str:
    if len(text) <= most:
        return text
    half, left_out = most // 2, len(text) - most
    return f"{text[:half]}\n[{left_out} characters are left out here]\n{text[-half:]}"


def error_of(exc: BaseException) -> dict[str, bytes]:
    import traceback

    if type(exc).__name__ == "CellFailed":
        return {
            key: clipped(part).encode("utf-8", "replace")
            for key, part in vars(exc)["parts"].items()
        }
    trace = exc.__traceback__
    while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("<cell "):
        trace = trace.tb_next
    try:
        text = "".join(traceback.format_exception(type(exc), exc, trace))
        value = str(exc)
    except Exception as other:  # noqa: BLE001  its own __str__ fails
        text = value = f"unprintable {type(exc).__name__}: {type(other).__name__}"
    parts = {"name": type(exc).__name__, "value": value, "traceback": text}
    return {key: clipped(part).encode("utf-8", "replace") for key, part in parts.items()}
