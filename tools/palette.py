"""The colours of phases and messages in timelines and schematics: Okabe and Ito's, which
colour-blind readers tell apart. No library is needed to read them."""

FORWARD = "#0072b2"    # blue
BACKWARD = "#009e73"   # bluish green
OPTIMIZER = "#d55e00"  # vermillion
DP = "#cc79a7"         # reddish purple
GATHERS = "#7a4964"    # the same, darker: all-gathers where there are other collectives, too
EXPOSED = "#f0e442"    # yellow: waiting for messages
SKEW = "#e4e7eb"       # waiting for a later rank
OTHER = "#b4bac2"
INK = "#22262b"
MUTED = "#5f6670"


def luminance(color):
    """Relative luminance, 0 to 1, as the contrast of WCAG 2 has it."""
    parts = [int(color[at:at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    """1 for equal colours to 21 for black and white."""
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def text_on(color):
    """White or black, whichever is read better on the colour."""
    return max(("#ffffff", "#000000"), key=lambda ink: contrast(ink, color))
