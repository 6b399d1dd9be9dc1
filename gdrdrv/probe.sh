#!/bin/sh
# SPDX-License-Identifier: (GPL-2.0 OR MIT)
# probe.sh OUT QUESTIONS COMPILER FLAG...
#
# Writes OUT, a header of macros with the answers to QUESTIONS, a file of `ask` lines. Each question is asked twice, in the
# form of either answer: exactly one of the two must compile. Anything else means that the question no longer fits, and
# stops the build with the compiler's words.
set -eu

out=$1
questions=$2
shift 2
log=${out%.h}.log
snippet=$out.c
trap 'rm -f "$snippet" "$out.tmp"' EXIT
: >"$log"

# compiles HEADER DECLARATIONS COMPILER FLAG...: prints 1 or 0.
compiles() {
	printf '#include <linux/types.h>\n#include <%s>\n%s\n' "$1" "$2" >"$snippet"
	shift 2
	echo "--- $(cat "$snippet")" >>"$log"
	if "$@" -Wno-error -Werror=implicit-function-declaration -Werror=incompatible-pointer-types \
		-Werror=int-conversion -x c -c -o /dev/null "$snippet" >>"$log" 2>&1; then
		echo 1
	else
		echo 0
	fi
}

# answer MACRO HEADER YES NO COMPILER FLAG...
answer() {
	macro=$1 header=$2 yes=$3 no=$4
	shift 4
	has=$(compiles "$header" "$yes" "$@")
	lacks=$(compiles "$header" "$no" "$@")
	if [ "$has" = "$lacks" ]; then
		cat "$log" >&2
		echo "gdrdrv: the question for $macro has no answer: both or none of its forms compile, see above" >&2
		exit 1
	fi
	echo "#define $macro $has" >>"$out.tmp"
}

echo "/* Written by probe.sh. */" >"$out.tmp"
. "$questions"
mv "$out.tmp" "$out"
