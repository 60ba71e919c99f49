"""Lean: environments, drivers, and all that runs beside a candidate.

In reading order::

    driver.py         what turns an operation into Lean's answer
    lean_driver.py    the driver that runs the ``lean`` program
    language_server/  Lean's own server: one process for a header reads text after text
    echo.py           the driver without a Lean
    toolchain.py      finding Lean, and the command that starts it
    builds.py         which Lean compiled a module, and libraries that this one cannot read
    environment.py    what a check can import, and its fingerprint
    lean_options.py   the options that all of its texts have
    nearest.py        the modules that an unknown name may have meant
    watch.py          whether its folders were written to since the last look
    files.py          the files of an environment, as they are found
    hashes.py         their contents' hashes, remembered in the cache folder
    baked_hashes.py   those that an image brings
    process.py        one run of ``lean``
    profile.py        where Lean spends its time in a text
    sandbox/          the walls and limits around it
    fork_server/      a process that has imported a header, forked for each text
    headers_memory.py one budget for the processes that stand ready
    prefixes.py       what Lean has made of what texts begin with
    check.py          a text compiled, and judged
    examples.py       the examples of a text, and the sorries that it names
    syntax.py         as much of Lean's surface syntax as that needs
    diagnostics.py    what Lean printed and how it ended, as a verdict
    plain.py          what Lean says by itself, to compare leanq with
    audit/            what is held against Lean's own word: accepted means proved
    pass_memory.py    what a self-test has shown of this machine
    targets.py        what candidates are verified against
    completions.py    what models write, made into such texts
    answers.py        the blocks of it that may be code
    commands.py       the commands of a text, and the names that it declares
    declarations.py   what a text declares, from its compiled data
    steps/            the goals of a text's holes, and tactics tried on them
    recipes.py        what a state is, and its id
    snapshots/        prefixes that were elaborated: kept, fetched, weighed against a replay
    data/             the small Core, the filter of system calls, what starts Lean
"""
