"""Numbers that pages, figures and reports show, as plain dataclasses. The functions read a store and render nothing."""
