#!/bin/sh
if [ "$(git -C /app log --format=%s --reverse | tr "\n" " ")" = "a b " ] && [ "$(git -C /app show --name-only --format= HEAD)" = b.txt ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
