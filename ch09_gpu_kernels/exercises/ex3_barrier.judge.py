"""Judge of ch09.ex3: goes through the steps of the tree and notes who has written what."""
from tools.exercise.lab import NotYet

THREADS, WARP = 256, 32
GAPS = [128, 64, 32, 16, 8, 4, 2, 1]


def crossing():
    """{gap: does a thread read what another warp has written?}; None if nobody has written it in the loop."""
    writer, found = {}, {}
    for gap in GAPS:
        readers = {writer[thread + gap] // WARP == thread // WARP
                   for thread in range(gap) if thread + gap in writer}
        found[gap] = None if not readers else not all(readers)
        writer.update({thread: thread for thread in range(gap)})
    return found


def judge(answer):
    """The words of a test's name, behind the right gaps; NotYet for wrong ones."""
    gaps, colon, words = answer.partition(":")
    if not colon or not gaps.replace(",", " ").strip():
        raise NotYet("the gaps are missing", "an answer is such as: 16 8: words of a test case's name")
    given = gaps.replace(",", " ").split()
    steps = crossing()
    for gap in given:
        if not gap.isdigit() or int(gap) not in steps:
            raise NotYet(f"no step has gap = {gap}", f"the gaps are {', '.join(map(str, GAPS))}")
    for gap, crosses in steps.items():
        if str(gap) in given and not crosses:
            raise NotYet(f"with gap = {gap} "
                         + ("threads read what was written before the loop, and a barrier is there" if crosses is None
                            else "those who write and those who read are of one warp"))
    for gap, crosses in steps.items():
        if str(gap) not in given and crosses:
            raise NotYet(f"with gap = {gap}, too, a warp reads what another has written")
    return words.strip()
