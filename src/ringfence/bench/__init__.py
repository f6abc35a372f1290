"""`ringfence bench`: what a sandbox costs here, beside the peers installed here.

Ratios against what runs in turns with us, in the same minute; never a bare number from yesterday.
"""
