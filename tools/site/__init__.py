"""`./book docs`: the tutorial as a static site. build.py says what belongs to it; the other modules
each make one kind of page. Standard library alone; only the reference needs Doxygen."""
