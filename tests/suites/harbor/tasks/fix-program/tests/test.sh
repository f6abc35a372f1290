#!/bin/sh
if [ "$(python3 /app/mean.py 1 2 3 6)" = 3.0 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
