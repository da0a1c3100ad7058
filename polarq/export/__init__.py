"""Results as files of other programs, and back: one file per format, `FORMATS` names them."""
