"""The colours of phases and messages in timelines and schematics: Okabe and Ito's, which
colour-blind readers tell apart. Then those of plots. No library is needed to read them."""

FORWARD = "#0072b2"    # blue
BACKWARD = "#009e73"   # bluish green
OPTIMIZER = "#d55e00"  # vermillion
DP = "#cc79a7"         # reddish purple
GATHERS = "#7a4964"    # the same, darker: all-gathers where there are other collectives, too
TP = "#56b4e9"         # sky blue
TP_GATHERS = "#346c8c"
EXPOSED = "#f0e442"    # yellow: waiting for messages
SKEW = "#e4e7eb"       # waiting for a later rank
OTHER = "#b4bac2"
INK = "#22262b"
MUTED = "#5f6670"

# (light, dark). Each of INKS is read as text on the paper, and the paper's colour on it.
PAPER = ("#ffffff", "#0d1117")
INKS = {"ink": (INK, "#e6edf3"), "muted": (MUTED, "#9ba5b1"), "blue": ("#2a5f9e", "#6ba3e0"),
        "orange": ("#bf5523", "#e2875c"), "green": ("#367f54", "#5fb284"),
        "red": ("#b3272d", "#ff9b8e")}
# What else a plot has of greys and tints; other colours stand out on either paper.
GREYS = {"grid": ("#e6e8eb", "#2d353f"), "lane": ("#eef0f3", "#1c232c"),
         "dark lane": ("#e0e4e9", "#2d353f"), "outside": ("#d9dde2", "#343c46"),
         "skew": (SKEW, "#3f4853"), "other": (OTHER, "#6b7480"), "forward": ("#aab1ba", "#4a525d"),
         "pale blue": ("#c9d7e7", "#25394f"), "light blue": ("#94afce", "#35577d"),
         "light green": ("#9bbfaa", "#345f48")}


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
