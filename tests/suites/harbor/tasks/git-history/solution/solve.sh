#!/bin/sh
set -e
cd /app
export GIT_AUTHOR_NAME=o GIT_AUTHOR_EMAIL=o@o GIT_COMMITTER_NAME=o GIT_COMMITTER_EMAIL=o@o
git init -q
for name in a b; do
  echo $name > $name.txt
  git add $name.txt
  git commit -qm $name
done
