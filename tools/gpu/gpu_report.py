"""What a chapter's page says of a report of ./book gpu-check: figures/gpu.json, if there is one."""
import json

NONE = "Not measured yet: no report of `./book gpu-check` on a GPU is here."


def text(folder):
    """One line of Markdown: the speed of the report, with its GPU and date; or that there is none."""
    file = folder / "gpu.json"
    if not file.exists():
        return NONE + "\n"
    record = json.loads(file.read_text(encoding="utf-8"))
    if not record["gpus"]:
        raise ValueError(f"{file}: a report of an emulated device says nothing about a GPU")
    states = {part["name"]: part for part in record["parts"]}
    said = []
    for rows in states["training"].get("figures", {}).values():
        for row in rows:
            if "tokens/s" not in row:  # what is asked, beside what was measured
                continue
            mfu = row["MFU, of the data sheet"]
            share = "" if mfu == "unknown" else f", {100 * float(mfu):.0f} % MFU"
            said.append(f"{row['model']} in {row['dtype']}: {row['tokens/s']:,.0f} tokens/s{share}")
    said = said or [f"no speed ({states['training']['why']})"]
    said.append(f"parity with the CPU {states['parity']['state']}")
    return (f"{'; '.join(said)} ([{record['gpus'][0]['name'].replace('NVIDIA ', '')}]"
            f"(figures/gpu.json), {record['date'][:10]}).\n")
