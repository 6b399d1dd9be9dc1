/* SPDX-License-Identifier: (GPL-2.0 OR MIT) */
/*
 * Differences between kernels and between NVIDIA drivers. probes.h is written by probe.sh, which asks the compiler; no
 * version number is compared, because distributions carry changes back.
 */
#ifndef GDRDRV_COMPAT_H
#define GDRDRV_COMPAT_H

#include "probes.h"

#if GDR_HAVE_CLASS_CREATE_OWNER
#define gdr_class_create(name)		class_create(THIS_MODULE, name)
#else
#define gdr_class_create(name)		class_create(name)
#endif

#if GDR_HAVE_CONST_DEVNODE
#define GDR_DEVNODE_DEVICE		const struct device
#else
#define GDR_DEVNODE_DEVICE		struct device
#endif

#if GDR_HAVE_VM_FLAGS_SET
#define gdr_vm_flags_set(vma, flags)	vm_flags_set(vma, flags)
#define gdr_vm_flags_clear(vma, flags)	vm_flags_clear(vma, flags)
#else
#define gdr_vm_flags_set(vma, flags)	((vma)->vm_flags |= (flags))
#define gdr_vm_flags_clear(vma, flags)	((vma)->vm_flags &= ~(flags))
#endif

#if GDR_HAVE_TABLE_FLAGS
#define gdr_table_cacheable(table)	(!!((table)->flags & NVIDIA_P2P_PAGE_TABLE_FLAGS_CPU_CACHEABLE))
#else
#define gdr_table_cacheable(table)	((void)(table), false)
#endif

#ifdef NVIDIA_P2P_CAP_GET_PAGES_PERSISTENT_API
#define GDR_HAVE_PERSISTENT		1
#define gdr_get_pages_persistent	nvidia_p2p_get_pages_persistent
#define gdr_put_pages_persistent	nvidia_p2p_put_pages_persistent
#else
#define GDR_HAVE_PERSISTENT		0
#define gdr_get_pages_persistent(va, size, table, flags)	((void)(table), -EOPNOTSUPP)
#define gdr_put_pages_persistent(va, table, flags)		((void)(table), -EOPNOTSUPP)
#endif

#ifdef NVIDIA_P2P_FLAGS_FORCE_BAR1_MAPPING
#define GDR_HAVE_FORCE_PCIE		1
#define GDR_FORCE_PCIE_FLAG		NVIDIA_P2P_FLAGS_FORCE_BAR1_MAPPING
#else
#define GDR_HAVE_FORCE_PCIE		0
#define GDR_FORCE_PCIE_FLAG		0
#endif

/* What each architecture can map, and whether its cycle counter means anything. */
#if defined(CONFIG_X86_64)
#define GDR_HAVE_DEVICE_TYPE		0
#define GDR_CACHED_NEEDS_RAM		1	/* elsewhere the memory type tracking overrides a cached mapping */
#define gdr_tsc_khz()			tsc_khz
#define gdr_cycles()			get_cycles()
#elif defined(CONFIG_ARM64)
#define GDR_HAVE_DEVICE_TYPE		1
#define GDR_CACHED_NEEDS_RAM		0
#define gdr_tsc_khz()			0
#define gdr_cycles()			0ULL
#else
#error "gdrdrv supports x86-64 and arm64"
#endif

#endif /* GDRDRV_COMPAT_H */
