"""What Schemathesis has to know of the gateway; it is read in Schemathesis' own environment."""

import schemathesis


@schemathesis.serializer("application/x-ndjson")
def lines(_context: object, value: object) -> bytes:
    """A body of lines, which the description calls a text."""
    return value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")
