#!/bin/sh
# SPDX-License-Identifier: (GPL-2.0 OR MIT)
# probe.sh OUT COMPILER FLAG...
#
# Writes OUT, a header of GDR_HAVE_* macros. Each question is asked twice, in the form of either answer: exactly one of the
# two must compile. Anything else means that the question no longer fits, and stops the build with the compiler's words.
set -eu

out=$1
shift
log=${out%.h}.log
snippet=$out.c
trap 'rm -f "$snippet" "$out.tmp"' EXIT
: >"$log"

compiles() {
	cat >"$snippet"
	echo "--- $(cat "$snippet")" >>"$log"
	"$@" -Wno-error -Werror=implicit-function-declaration -Werror=incompatible-pointer-types -Werror=int-conversion \
		-x c -c -o /dev/null "$snippet" >>"$log" 2>&1
}

# probe MACRO INCLUDE YES NO COMPILER FLAG...: YES and NO are declarations.
probe() {
	macro=$1 include=$2 yes=$3 no=$4
	shift 4
	form='#include <linux/types.h>\n#include <%s>\n%s\n'
	if printf "$form" "$include" "$yes" | compiles "$@"; then has=1; else has=0; fi
	if printf "$form" "$include" "$no" | compiles "$@"; then lacks=1; else lacks=0; fi
	if [ "$has" = "$lacks" ]; then
		cat "$log" >&2
		echo "gdrdrv: the probe for $macro has no answer: both or none of its forms compile, see above" >&2
		exit 1
	fi
	echo "#define $macro $has" >>"$out.tmp"
}

echo "/* Written by probe.sh. */" >"$out.tmp"

probe GDR_HAVE_CLASS_CREATE_OWNER linux/device.h \
	'struct class *gdr_probe(void); struct class *gdr_probe(void) { return class_create((struct module *)0, "x"); }' \
	'struct class *gdr_probe(void); struct class *gdr_probe(void) { return class_create("x"); }' "$@"

probe GDR_HAVE_CONST_DEVNODE linux/device.h \
	'struct class gdr_probe = { .devnode = (char *(*)(const struct device *, umode_t *))0 };' \
	'struct class gdr_probe = { .devnode = (char *(*)(struct device *, umode_t *))0 };' "$@"

# A distribution may have the function and still let the field be written: the second form declares the name anew.
probe GDR_HAVE_VM_FLAGS_SET linux/mm.h \
	'void gdr_probe(struct vm_area_struct *v); void gdr_probe(struct vm_area_struct *v) { vm_flags_set(v, VM_IO); }' \
	'extern char vm_flags_set;' "$@"

probe GDR_HAVE_TABLE_FLAGS nv-p2p.h \
	'u32 gdr_probe(struct nvidia_p2p_page_table *t); u32 gdr_probe(struct nvidia_p2p_page_table *t) { return t->flags & NVIDIA_P2P_PAGE_TABLE_FLAGS_CPU_CACHEABLE; }' \
	'_Static_assert(sizeof(struct nvidia_p2p_page_table) == 32, "");' "$@"

mv "$out.tmp" "$out"
