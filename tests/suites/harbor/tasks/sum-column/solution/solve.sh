#!/bin/sh
set -e
cd /app
awk -F, '{ sum += $2 } END { print sum }' prices.csv > sum.txt
