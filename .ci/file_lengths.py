"""Reports how long the project's Python files are; fails when one passes the bound.

Files of 50 to 250 lines are the aim. Past 400 a file has two jobs and must be cut; generated
code is left out.
"""

import subprocess
import sys

AIM, BOUND = 250, 400


def main() -> int:
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    lengths = []
    for name in names:
        if "_pb2" in name:
            continue
        try:
            with open(name, encoding="utf-8") as file:
                lengths.append((sum(1 for _ in file), name))
        except FileNotFoundError:
            continue  # deleted in the working tree, not yet in the index
    lengths.sort(reverse=True)
    above_aim = [(n, name) for n, name in lengths if n > AIM]
    too_long = [(n, name) for n, name in lengths if n > BOUND]
    total = sum(n for n, _ in lengths)
    print(f"file lengths: {len(lengths)} files, {total} lines, {len(above_aim)} above {AIM}")
    for n, name in above_aim:
        print(f"  {n:4d} {name}{'   <- over the bound' if n > BOUND else ''}")
    if too_long:
        print(f"error: {len(too_long)} file(s) over {BOUND} lines: which two jobs does each do?")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
