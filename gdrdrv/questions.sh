# SPDX-License-Identifier: (GPL-2.0 OR MIT)
# Read by probe.sh: macro, header, what compiles if the answer is yes, what compiles if it is no, the compiler.

answer GDR_HAVE_CLASS_CREATE_OWNER linux/device.h \
	'struct class *gdr_probe(void); struct class *gdr_probe(void) { return class_create((struct module *)0, "x"); }' \
	'struct class *gdr_probe(void); struct class *gdr_probe(void) { return class_create("x"); }' "$@"

answer GDR_HAVE_CONST_DEVNODE linux/device.h \
	'struct class gdr_probe = { .devnode = (char *(*)(const struct device *, umode_t *))0 };' \
	'struct class gdr_probe = { .devnode = (char *(*)(struct device *, umode_t *))0 };' "$@"

# A distribution may have the function and still let the field be written: the second form declares the name anew.
answer GDR_HAVE_VM_FLAGS_SET linux/mm.h \
	'void gdr_probe(struct vm_area_struct *v); void gdr_probe(struct vm_area_struct *v) { vm_flags_set(v, VM_IO); }' \
	'extern char vm_flags_set;' "$@"

answer GDR_HAVE_TABLE_FLAGS nv-p2p.h \
	'typedef struct nvidia_p2p_page_table table; u32 gdr_probe(table *t);
	u32 gdr_probe(table *t) { return t->flags & NVIDIA_P2P_PAGE_TABLE_FLAGS_CPU_CACHEABLE; }' \
	'_Static_assert(sizeof(struct nvidia_p2p_page_table) == 32, "");' "$@"
