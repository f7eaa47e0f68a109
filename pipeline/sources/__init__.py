"""Sources of image-text pairs: each form is one module with one reader, and all become the same table of rows."""
