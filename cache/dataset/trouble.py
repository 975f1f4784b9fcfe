"""What an action's exception means to an operator."""

import kit.errors

AGAIN = "see the kernel log; it is tried again"


def of(name: str, view: str, error: Exception) -> kit.errors.AgentError:
    """``name`` of the dataset whose ``view`` was to change."""
    if isinstance(error, RuntimeError):  # a child process died, for lack of memory perhaps
        why = f"a helper process failed ({str(error).splitlines()[-1]})"
        return kit.errors.HostError(f"dataset {name}", why, AGAIN)
    if isinstance(error, OSError):
        thing = f"dataset {name}: view {view}"
        return kit.errors.HostError(thing, f"{error.strerror or error}", AGAIN)
    assert isinstance(error, kit.errors.AgentError)
    return error
