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
    # Bound now: what the program does to these modules later does not matter.
    write, leave, tell, word = os.write, os._exit, job["tell"], job["word"]
    # A module of that name is there for what looks itself up, such as dataclasses. Its name is not __main__: a block under
    # `if __name__ == "__main__"` is for people who run the program, and would wait for their input.
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    try:
        for code in (job["code"], job["setup"]):
            exec(compile(code, "answer.py", "exec"), module.__dict__)
        for index, test in enumerate(job["tests"]):
            if passes(test, module.__dict__):
                write(tell, f"{word} {index}\n".encode())
            elif job["limits"]["stop_at_failure"]:
                break
    except BaseException:  # SystemExit too: a program that leaves has passed no test
        pass
    leave(0)


def passes(test: str, names: dict[str, object]) -> bool:
    try:
        exec(compile(test, "test.py", "exec"), names)
    except BaseException:
        return False
    return True


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
