"""The process of one program: takes the job from stdin, gives up what the program may not have, runs it and its tests.

Run as a script by `python -I`: nothing of this project can be imported here.
"""

import json
import math
import os
import resource
import sys
import types
from pathlib import Path


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0)  # noqa: SIM115 - what `input()` reads
    limit(job["limits"])
    if sys.platform == "linux":
        sys.path.insert(0, str(Path(__file__).parent))
        import sandboxed_linux  # type: ignore[import-not-found]

        sys.path.pop(0)
        sandboxed_linux.confine(Path.cwd())
    tests = [compiled(test, "test.py") for test in job["tests"]]
    code = [compiled(text, "answer.py") for text in (job["code"], job["setup"])]
    # A module of that name is there for what looks itself up, such as dataclasses. Its name is not __main__: a block under
    # `if __name__ == "__main__"` is for people who run the program, and would wait for their input.
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    # Bound now, and named by no module that the program can import: it cannot put its own in their place.
    write, leave, execute, anything = os.write, os._exit, exec, BaseException
    tell, word, stop_at_failure = job["tell"], job["word"], job["limits"]["stop_at_failure"]

    def passes(test: types.CodeType | None) -> bool:
        if test is None:
            return False
        try:
            execute(test, module.__dict__)
        except anything:  # SystemExit too: a program that leaves has passed no test
            return False
        return True

    sys.modules["__main__"] = types.ModuleType("__main__")
    globals().clear()
    if passes(code[0]) and passes(code[1]):
        for index, test in enumerate(tests):
            if passes(test):
                write(tell, f"{word} {index}\n".encode())
            elif stop_at_failure:
                break
    leave(0)


def compiled(code: str, name: str) -> types.CodeType | None:
    try:
        return compile(code, name, "exec")
    except Exception:  # mostly SyntaxError; ValueError, MemoryError and RecursionError of odd ones
        return None


def limit(limits: dict[str, float]) -> None:
    lower({resource.RLIMIT_CPU: math.ceil(limits["timeout_s"])})  # whole seconds is what there is
    confine_resources(int(limits["memory"]), int(limits["file_size"]))


def confine_resources(memory: int, file_size: int) -> None:
    lower(
        {
            resource.RLIMIT_AS: memory,
            resource.RLIMIT_FSIZE: file_size,
            resource.RLIMIT_NOFILE: 64,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NPROC: 0,  # counts all processes of the user, root's excepted: 0 is no further one
        }
    )


def lower(limits: dict[int, int]) -> None:
    for what, most in limits.items():
        _, hard = resource.getrlimit(what)
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        try:
            resource.setrlimit(what, (most, most))
        except (ValueError, OSError):
            continue  # a limit that this system does not have


if __name__ == "__main__":
    main()
