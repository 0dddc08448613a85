"""How far apart numbers may lie that rounding alone keeps apart, relative: one table for ctest, the
emulated GPU and `./book gpu-check`.

Run as a program it prints the table as a C++ header, for the tests under tests/.
"""
TOLERANCES = {
    # What an operation gives, beside a reference or the CPU. f32: a few hundred sums of 2^-24; bf16:
    # two roundings to 8 bits, of 2^-9 each.
    "operation": {"f64": 1e-12, "f32": 1e-5, "bf16": 5e-3},
    # Five steps of a model of some thousand weights, beside PyTorch in f64 or the CPU. A wrong sign of
    # RoPE moves the loss by 2.5e-4 and the norm by 2.8e-3.
    "loss": {"f64": 1e-10, "f32": 2e-6, "bf16": 2e-3},
    "grad_norm": {"f64": 1e-10, "f32": 2e-5, "bf16": 2e-2},
    # Five steps of gpu-check's model, of some million weights: the loss and the norm.
    "steps": {"f64": 1e-10, "f32": 5e-5, "bf16": 1e-2},
}


def main():
    print("#pragma once\n\nnamespace usp::test {\n\n/// See tools/gpu/tolerances.py.\n"
          "struct Tolerance {\n  double f64, f32, bf16;\n};")
    for name, of in TOLERANCES.items():
        values = ", ".join(repr(of[dtype]) for dtype in ("f64", "f32", "bf16"))
        print(f"inline constexpr Tolerance k{name.title().replace('_', '')}Tolerance = {{{values}}};")
    print("\n}  // namespace usp::test")


if __name__ == "__main__":
    main()
