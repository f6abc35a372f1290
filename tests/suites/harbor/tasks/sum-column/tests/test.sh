#!/bin/sh
if [ "$(cat /app/sum.txt)" = 60 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
