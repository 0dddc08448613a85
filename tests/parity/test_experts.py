"""Training of a mixture of experts against reference.py: the same flags, the same numbers.

  test_experts.py --binary build/release/bin/ch06_expert [unittest arguments]

Needs a Python with NumPy; without one it exits with 77, which ctest reports as skipped.
"""

import importlib.util
import sys
import unittest

import binary
import test_reference

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_ffn_hidden_size": 20}

# Each differs from EXPERTS as stated, and the numbers of the run from those without "shows".
CONFIGS = {
    "softmax": {"shows": {"num_experts_per_tok": 1}},
    "one_expert_of_16": {"num_experts": 16, "num_experts_per_tok": 1,
                         "shows": {"num_experts": 4}},
    "normalised_gates": {"num_experts_per_tok": 3, "norm_topk_prob": True,
                         "shows": {"norm_topk_prob": False}},
    "sigmoid": {"router_score": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
                "shows": {"routed_scaling_factor": 1}},
    "shared_experts_and_a_dense_layer": {"num_shared_experts": 2, "first_dense_layers": 1,
                                         "shows": {"num_shared_experts": 0}},
    "all_experts": {"num_experts": 4, "num_experts_per_tok": 4,
                    "shows": {"num_experts_per_tok": 2}},
    "nodes": {"num_experts": 16, "num_experts_per_tok": 4, "expert_nodes": 4, "route_nodes": 2,
              "shows": {"route_nodes": 0}},
    "sample_balance": {"balance": "sample", "balance_coef": 0.1, "shows": {"balance": "none"}},
    "sample_balance_of_sigmoid": {"balance": "sample", "balance_coef": 0.1,
                                  "router_score": "sigmoid",
                                  "shows": {"router_score": "softmax"}},
    "batch_balance": {"balance": "batch", "balance_coef": 0.1, "shows": {"balance": "sample"}},
    "bias_balance": {"balance": "bias", "bias_update_rate": 0.02, "router_score": "sigmoid",
                     "shows": {"bias_update_rate": 0}},
    "z_loss": {"router_z_loss_coef": 0.05, "shows": {"router_z_loss_coef": 0}},
    # Groups are ranked by their best 2 experts: 3 choices over 2 nodes, rounded up.
    "choices_that_nodes_share_unevenly": {
        "num_experts": 16, "num_experts_per_tok": 3, "expert_nodes": 4, "route_nodes": 2,
        "shows": {"route_nodes": 0}},
    "capacity": {"capacity_factor": 1.0, "drops": True, "shows": {"capacity_factor": 0.5}},
    # 3.6 choices are 4, as many as 1.0 allows, and not 3.
    "capacity_rounded_up": {"capacity_factor": 0.9, "drops": True,
                            "shows": {"capacity_factor": 0.75}},
    # A mean of 5.33 choices is not rounded before the factor: 6 are taken, 5 where it is 0.9.
    "capacity_of_an_uneven_mean": {"num_experts": 6, "capacity_factor": 1.0, "drops": True,
                                   "shows": {"capacity_factor": 0.9}},
    # As in DeepSeek-V3, in small.
    "everything": {"num_experts": 16, "num_experts_per_tok": 4, "num_shared_experts": 1,
                   "first_dense_layers": 1, "router_score": "sigmoid", "norm_topk_prob": True,
                   "routed_scaling_factor": 2.5, "expert_nodes": 4, "route_nodes": 2,
                   "balance": "bias", "bias_update_rate": 0.02, "num_layers": 3,
                   "capacity_factor": 1.25, "drops": True, "shows": {"first_dense_layers": 0}},
}
# Of the loads that are no counts.
TOLERANCE = {"expert_loss": 1e-10, "entropy": 1e-9, "max_over_mean": 1e-9}


class Experts(test_reference.Comparison):
    def binary(self, flags, dtype, attention):
        self.written = super().binary(flags, dtype, attention)
        return self.written

    def check_loads(self, want):
        """What the run has written of its loads is what the reference says, by step and layer."""
        for step, (found, loads) in enumerate(zip(self.written, want)):
            self.assert_near("expert_loss", found, loads, step)
            self.assertEqual(len(found["experts"]), len(loads["experts"]))
            for layer, expected in zip(found["experts"], loads["experts"]):
                for key in ("layer", "tokens", "dropped"):
                    self.assertEqual(layer[key], expected[key], f"step {step}, {key}")
                self.assert_near("entropy", layer, expected, step)
                self.assert_near("max_over_mean", layer, expected, step)

    def assert_near(self, key, found, expected, step):
        off = abs(float(found[key]) - expected[key])
        self.assertTrue(off <= TOLERANCE[key] * abs(expected[key]),
                        f"step {step}, {key}: {found[key]}, reference {expected[key]}")

    def check_experts(self, changes):
        changes = dict(EXPERTS, **changes)
        shows, drops = changes.pop("shows"), changes.pop("drops", False)
        flags = self.flags(changes)
        want, other = self.reference(flags), self.reference(dict(flags, **shows))
        self.assertEqual(any(layer["dropped"] > 0 for layer in want[-1]["experts"]), drops)
        relative = abs(want[-1]["grad_norm"] / other[-1]["grad_norm"] - 1)
        self.assertGreater(relative, 1e-6, shows)
        loads = [{key: record.pop(key) for key in ("expert_loss", "experts")} for record in want]
        flags = {name: value for name, value in flags.items() if not self.is_idle(name, flags)}
        self.compare(flags, want, "f64", attentions=("blockwise",))
        self.check_loads(loads)

    @staticmethod
    def is_idle(name, flags):
        """A flag that the program refuses without another."""
        return (name == "balance_coef" and flags.get("balance") not in ("sample", "batch")
                or name == "bias_update_rate" and flags.get("balance") != "bias")


def add_config_test(name, changes):
    setattr(Experts, "test_float64_" + name, lambda self: self.check_experts(changes))


for config_name, config_changes in CONFIGS.items():
    add_config_test(config_name, config_changes)


def main():
    test_reference.BINARY, rest = binary.parse(__doc__)
    if importlib.util.find_spec("numpy") is None:
        print("skipped: the reference needs NumPy (on Debian and Ubuntu: apt install "
              "python3-numpy)", file=sys.stderr)
        sys.exit(77)
    unittest.main(argv=[sys.argv[0]] + rest)


if __name__ == "__main__":
    main()
