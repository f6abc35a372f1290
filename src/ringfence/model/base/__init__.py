"""Base of all model classes: value equality, one JSON form, checks of single values, ids."""
