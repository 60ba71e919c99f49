"""The page: a fleet in a browser, a request with its text, and a box to try Lean in.

The gateway renders everything and escapes all texts from Redis; the browser swaps in the changes::

    sessions.py      finds the caller: by a key, or by a signed cookie
    viewers.py       what a caller may see and change
    looks.py         looks at the fleet once for all who watch
    sections.py      the parts of the overview
    requests.py      one request: its place, its text, and its messages
    forms.py         reads the forms that browsers send
    texts.py         makes texts from anybody fit to be seen
    actions.py       the changes that callers make
    campaigns.py     campaigns, where RQ is installed
    routes.py        the ASGI application
    templates/       the HTML; static/ the style, our script, and vendored libraries
"""
