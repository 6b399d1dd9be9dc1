# SPDX-License-Identifier: (GPL-2.0 OR MIT)
# Read by probe.sh: macro, header, what compiles if the answer is yes, what compiles if it is no, the compiler.

answer NVP2P_HAVE_FOLLOW_PFNMAP linux/mm.h \
	'int nvp2p_probe(struct follow_pfnmap_args *a); int nvp2p_probe(struct follow_pfnmap_args *a) { return follow_pfnmap_start(a); }' \
	'struct follow_pfnmap_args { int x; };' "$@"
