"""A text through Lean: toolchains, compiled files, processes, forks.

::

    toolchain.py       finding Lean, its options, and modules that it cannot read
    lean_launcher.py   starts a Lean that is a shared library
    files.py           files of an environment, their hashes, and the names near to a missing one
    baked_hashes.py    hashes that an image brings
    layouts.py         layouts of compiled files, and the shapes of expressions
    image.py           a compiled file as words and objects
    olean.py           its constants, and what they refer to
    library_syntax.py  a library's syntax that evaluates, found in a text
    programs.py        whether a text can run programs while Lean compiles it
    evaluators.py      the syntax of libraries that evaluates
    process.py         one run of ``lean``: by a fork, a server's process, or a new one
    fork_server.py     which header forks, and when
    headers.py         which headers can be imported ahead, and which are from the start
    proof.py           forks compared with plain Lean before they serve
    zygote_client.py   the worker's side of a zygote
    zygote.py          a process that has imported a header, and one behind a prefix
    preloaded.py       Lean within it, and its code in huge pages
    evaluations.py     what a fork evaluates, reported before it runs
    documents.py       Lean's language server: which process reads which text
    protocol.py        its messages
    headers_memory.py  one budget of memory for all that stands ready behind headers
    pass_memory.py     what a self-test has shown of this machine
    plain.py           what Lean says by itself, to compare leanq with
    profile.py         where Lean spends its time in a text
"""
