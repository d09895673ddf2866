"""Options that are objects: what each declares, and the registries that extensions add to."""
