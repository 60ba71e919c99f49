"""Lean's printer and elaborator behind what the kernel has accepted, called through ctypes.

They come after the verdict. They know the header's notation, instances and elaborators, and of a
candidate its constants alone. Names and types of the functions are a compiler's output, as in
:mod:`leanq.lean.audit.kernel`.
"""

from __future__ import annotations

from collections.abc import Mapping

from leanq.lean.audit.image import Name
from leanq.lean.audit.kernel import (
    CLOSED_BOX,
    WORD_BYTES,
    Kernel,
    KernelLimitError,
    KernelUnavailableError,
    lean_function,
    retain,
    word,
)

_IS_NOT_UNFOLDED = 1  # the constructor of `Lean.ReducibilityStatus`


class Elaborator:
    """Lean's printer and elaborator in the process of a kernel.

    Raises:
        KernelUnavailableError: the library lacks a function; it judges without.
    """

    _set_module = lean_function("l_Lean_Environment_setMainModule", "oo")
    _elaborated = lean_function("l_Lean_Environment_ofKernelEnv", "o")
    _set_option = lean_function("l_Lean_Options_insert", "ooo")
    _print = lean_function("l_Lean_PrettyPrinter_ppExprLegacy", "ooooo")
    _pretty = lean_function("l_Std_Format_pretty", "oooo")
    _is_instance = lean_function("l_Lean_Meta_isInstanceCore", "oo", "b")
    _is_class = lean_function("l_Lean_isClass", "oo", "b")
    _reducibility = lean_function("l_Lean_getReducibilityStatusCore", "oo", "b")
    _declare = lean_function("l_Lean_Environment_addDeclCore", "oqqoob")
    _input = lean_function("l_Lean_Parser_mkInputContext___redArg", "oobo")
    _state = lean_function("l_Lean_Elab_Command_mkState", "ooo")
    _process = lean_function("l_Lean_Elab_IO_processCommands", "oooo")
    _start_threads = lean_function("lean_init_task_manager_using", "u", "-")
    _has_errors = lean_function("l_Lean_MessageLog_hasErrors", "o", "b")
    _same = lean_function("lean_expr_eqv", "oo", "b")

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._env = kernel, 0
        self._module: Name = ()
        self._declared: int | None = None
        try:
            kernel.bind(self)
            self._no_locals = kernel.value("l_Lean_LocalContext_empty")
            self._no_metas = kernel.value("l_Lean_instInhabitedMetavarContext")
            self._no_messages = kernel.value("l_Lean_MessageLog_empty")
        except AttributeError as error:
            raise KernelUnavailableError(f"Lean's library prints nothing: {error}") from None

    def begin(self, module: Name) -> None:
        """Takes over what the kernel has accepted, as declared by this module.

        Private names of other modules cannot be read.
        """
        self._module = module
        retain(self._kernel.env)
        self._env = self._inside(int(self._elaborated(self._kernel.env)))

    def end(self) -> bool:
        """Forgets that; returns False once Lean has threads here, which no other file may meet."""
        self._env = 0
        return self._declared is None

    def options(self, values: Mapping[str, int | bool]) -> int:
        """Returns Lean's options with these values."""
        found = self._kernel.no_options
        for name, value in values.items():
            key = self._kernel.name(name.split("."))
            found = self._set_option(found, key, self._data(value))
        return found

    def note(self, values: Mapping[str, bool]) -> int:
        """Returns the same as metadata, for the printing of one expression."""
        kernel = self._kernel
        return kernel.list(
            kernel.construct(0, kernel.name(name.split(".")), self._data(value))
            for name, value in values.items()
        )

    def is_instance(self, name: int) -> bool:
        """Returns whether a constant is registered as an instance."""
        for each in (self._env, name):
            retain(each)
        return bool(self._is_instance(self._env, name))

    def may_be_class(self, name: int) -> bool:
        """Returns whether a constant is a class, or one that Lean unfolds as it looks for one."""
        for each in (self._env, self._env, name, name):
            retain(each)
        if self._is_class(self._env, name):
            return True
        return bool(self._reducibility(self._env, name) != _IS_NOT_UNFOLDED)

    def printed(self, expression: int, options: int, width: int) -> str:
        """Returns a closed expression in Lean's own words.

        Raises:
            KernelLimitError: Lean cannot print it, or not within the options' limits.
        """
        kernel = self._kernel
        for each in (self._env, expression, options, self._no_locals, self._no_metas):
            retain(each)
        result = self._print(self._env, self._no_metas, self._no_locals, options, expression)
        if kernel.tag(result) != 0:
            raise KernelLimitError("Lean cannot print it")
        return kernel.read_string(self._pretty(word(result + WORD_BYTES), kernel.nat(width), 1, 1))

    def elaborate(self, commands: str) -> int | None:
        """Returns the kernel's environment behind commands, which see the header and all that the
        kernel has accepted; None if one of them is an error."""
        kernel = self._kernel
        if self._declared is None:
            self._start_threads(1)
            self._declared = self._with_all_declared()
        if not self._declared:
            return None
        size = kernel.nat(len(commands.encode()))
        source = self._input(kernel.text(commands), kernel.text(""), 0, size)
        state = self._state(self._declared, self._no_messages, kernel.no_options)
        start = kernel.construct(0, kernel.nat(0), scalars=bytes([0]))
        result = self._process(source, start, state, CLOSED_BOX)
        if kernel.tag(result) != 0:
            return None
        made, messages = kernel.cell(word(word(result + WORD_BYTES) + WORD_BYTES))[1:3]
        return None if self._has_errors(messages) else int(self._kernel.kernel_env(made))

    def type_of(self, environment: int, name: int) -> int | None:
        """Returns the type of a constant of the kernel's environment; None if there is none."""
        option = self._kernel.found(environment, name)
        return None if option & 1 else self._kernel.type_in(word(option + WORD_BYTES))

    def same(self, one: int, other: int) -> bool:
        """Returns whether two expressions are equal; names of bound variables do not matter."""
        return bool(self._same(one, other))

    def _inside(self, environment: int) -> int:
        """Returns an environment as the module sees it."""
        return int(self._set_module(environment, self._kernel.name(self._module)))

    def _with_all_declared(self) -> int:
        """Returns the header's environment with all that the kernel has accepted; 0 if Lean cannot
        make it."""
        kernel, environment, unchecked = self._kernel, self._kernel.imports, 0
        for each in kernel.added:
            result = self._declare(environment, 0, 0, each, CLOSED_BOX, unchecked)
            if kernel.tag(result) != 1:
                return 0
            environment = word(result + WORD_BYTES)
        environment = self._inside(environment)
        # Otherwise a thread counts its references, and this one does not see that.
        kernel.mark_persistent(environment)
        return environment

    def _data(self, value: int | bool) -> int:
        """Returns a `DataValue`."""
        kernel = self._kernel
        if isinstance(value, bool):
            return kernel.construct(1, scalars=bytes([value]))
        return kernel.construct(3, kernel.nat(value))
