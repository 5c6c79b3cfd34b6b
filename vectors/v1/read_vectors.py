# Judges textbook D, C and keep (forward KL, TV) in float64 by the vectors beside this file.
import json
from pathlib import Path

import numpy as np

numbers = np.vectorize(lambda u: float.fromhex(u) if isinstance(u, str) else u)
folder, failed, _ = Path(__file__).parent, 0, np.seterr(all="ignore")
inputs = json.loads((folder / "inputs.json").read_text())["inputs"]
for path in sorted(folder.glob("*-[kt][lv].json")):
    for v in json.loads(path.read_text())["vectors"]:
        p, arrays = v["parameters"], inputs[v["input"]]["arrays"]
        if v["result"] != "required" or "reverse" in v["id"] or "logits" not in arrays:
            continue  # conventions, other divergences, stored log-probs alone
        valid = arrays["response_mask"]["values"]
        x = {n: numbers(s["values"]).reshape(-1, *s["shape"][2:])[valid] for n, s in arrays.items()}
        for t in {*range(sum(valid))} - {t for e in v["exceptions"] for t in e["tokens"]}:
            k, a, z = x["tokens"][t], x["advantages"][t], x["logits"][t]
            y = x["behavior_logits"][t] if v["view"] == "full" else z
            lp, lm = (u - u.max() - np.log(np.exp(u - u.max()).sum()) for u in (z, y))
            rate = np.exp(lp)
            if v["view"] != "full":  # the sampled and the listed tokens, then the tail
                listed = zip(x["topk_ids"][t], x["topk_logprobs"][t], strict=True)
                top = {i: u for i, u in listed if u > -np.inf and v["view"] == "topk"}
                kept = {k: x["behavior_logprobs"][t]} | top
                k, tail, lp, lm = 0, np.delete(rate, [*kept]), lp[[*kept]], [*kept.values()]
                lm = np.append(lm, np.log(max(0, 1 - np.exp(lm).sum()) if tail.size else 0))
                rate = np.append(np.exp(lp), (tail**2).sum() / (tail.sum() or 1))
                lp = np.append(lp, np.log(tail.sum()))
            mu, pi, tv = np.exp(lm), np.exp(lp), p["divergence"] == "tv"
            d = abs(mu - pi).sum() / 2 if tv else np.where(mu > 0, mu * (lm - lp), 0).sum()
            h = pi * np.sign(pi - mu) / 2 if tv else -mu  # pi f'(pi / mu)
            c = h[k] - h @ rate - h.sum() * (pi[k] - pi @ rate)
            push = np.sign(a) * (c if p.get("direction") == "predictive" else lp[k] - lm[k])
            delta = float.fromhex(p.get("delta_high" if a > 0 else "delta_low", "0"))
            answers = {"divergence": d, "coefficient": c, "keep": 1 * (d <= delta or push <= 0)}
            gap = answers[v["quantity"]] - numbers(v.get("nearest", v["expected"]))[t]
            failed += not (ok := abs(gap) <= v.get("budget_per_unit", v["expected"])[t] * 2**-53)
            print("pass" if ok else "FAIL", v["id"], t)
raise SystemExit(failed > 0)
