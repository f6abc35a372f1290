"""Native sandboxes that outlive their process: descriptors handed over, and taken back by a later process."""
