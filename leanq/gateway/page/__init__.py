"""The page: a fleet in a browser, a request with its text, and a box to try Lean in.

Everything is rendered here, with what candidates and other writers of Redis have written escaped;
the browser swaps in what has changed::

    sessions.py      who calls: a key, or a signed cookie in its place
    viewers.py       what the caller may see, and change
    looks.py         one look at the fleet for all who watch
    sections.py      what each part of the overview shows
    requests.py      one request: where it is, its text, and messages at their places
    forms.py         forms as browsers send them
    texts.py         texts that anybody may have written, made fit to be seen
    actions.py       what a caller changes
    campaigns.py     campaigns, where RQ is installed
    routes.py        all of it as an ASGI application
    templates/       the HTML; static/ the style, our script, and vendored libraries
"""
