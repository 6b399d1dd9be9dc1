/* SPDX-License-Identifier: (GPL-2.0 OR MIT) */
/*
 * Objects, their owners and their locks.
 *
 * gdr_file	one per open(). Referenced by the struct file and by every pin.
 * gdr_pin	one per successful pin request. Referenced by its file's tree until it is unpinned, by every VMA that maps
 *		it, by whoever looked it up, and, unless pages are persistent, by the free callback registered with the
 *		NVIDIA driver.
 *
 * Lock order: mmap_lock -> gdr_pin.lock; gdr_file.lock stands alone. No lock is held across a call into the NVIDIA driver:
 * it calls gdr_free_callback() under a lock of its own that its other entry points take, too. No lock is held across
 * copy_to_user() either, whose target may be a mapping of ours.
 */
#ifndef GDRDRV_INTERNAL_H
#define GDRDRV_INTERNAL_H

#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/fs.h>
#include <linux/io.h>
#include <linux/kref.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pid.h>
#include <linux/rbtree.h>
#include <linux/sched.h>
#include <linux/sizes.h>
#include <linux/slab.h>
#include <linux/timex.h>
#include <linux/uaccess.h>

#include <nv-p2p.h>

#include "compat.h"
#include "gdrdrv.h"

#define GDR_GPU_PAGE_SIZE	SZ_64K

/* The NVIDIA driver checks lengths only for alignment, and counts pages in 32 bits. */
#define GDR_MAX_PIN_SIZE	(1ULL << 40)

/* Libraries keep handles in 32 bits. */
#define GDR_HANDLE_END		(1ULL << 32)

struct gdr_file {
	struct kref ref;
	struct pid *tgid;		/* the opener: nobody else may use the file */
	struct mm_struct *mm;		/* the opener's; held by mmgrab() */
	struct address_space mapping;	/* every VMA of this file, for unmap_mapping_range() */

	struct mutex lock;		/* all below */
	struct rb_root pins;		/* by handle; handle ranges do not overlap */
	u64 next_handle;		/* where the search for a free range starts */
	unsigned int nr_pins;
	u64 bytes;
};

/* Physically contiguous part of a pin. */
struct gdr_run {
	u64 offset;			/* in the pin, in bytes */
	u64 paddr;
	u64 len;
	bool wc;			/* reserved as write-combined */
};

struct gdr_pin {
	struct kref ref;
	struct gdr_file *file;
	u64 handle;
	u64 va;				/* start of the first GPU page */
	u64 size;			/* whole GPU pages */
	u64 skew;			/* of the address asked for, from va */
	u64 token;
	u32 va_space;
	u32 pcie_flags;
	u64 tm_cycles;
	bool persistent;

	struct rb_node node;		/* file->lock */
	bool published;			/* file->lock; handle is reserved but not valid before */

	struct mutex lock;		/* all below */
	bool dead;			/* set once, before unmapping: no page is inserted any more */
	bool taken_back;		/* the free callback ran */
	bool cacheable;
	unsigned int nr_vmas;
	u32 requested_type;
	u32 type;			/* of the live mapping */
	struct nvidia_p2p_page_table *table;	/* NULL: nothing to put */
	struct gdr_run *runs;		/* own copy of the addresses; fixed once the pin is published */
	unsigned int nr_runs;
};

struct gdr_pin_request {
	u64 addr;
	u64 size;
	u64 token;
	u32 va_space;
	u32 flags;
};

/* main.c */
extern bool gdr_persistent;
extern unsigned int gdr_max_pins;
extern unsigned long long gdr_max_bytes;
extern atomic_long_t gdr_nr_tables;
extern int gdr_dbg_enabled;
bool gdr_file_is_owner(const struct gdr_file *file);
void gdr_file_get(struct gdr_file *file);
void gdr_file_put(struct gdr_file *file);

/* What a caller did wrong is of interest only while he is looking for it. */
#define gdr_dbg(fmt, ...)						\
do {									\
	if (gdr_dbg_enabled)						\
		pr_info_ratelimited(fmt, ##__VA_ARGS__);		\
} while (0)

/* ioctl.c */
long gdr_ioctl(struct file *filp, unsigned int cmd, unsigned long arg);

/* table.c: the pins of a file */
int gdr_table_reserve(struct gdr_file *file, struct gdr_pin *pin);
void gdr_table_publish(struct gdr_file *file, struct gdr_pin *pin);
void gdr_table_unreserve(struct gdr_file *file, struct gdr_pin *pin);
struct gdr_pin *gdr_table_find(struct gdr_file *file, u64 handle);
struct gdr_pin *gdr_table_claim(struct gdr_file *file, u64 handle);
struct gdr_pin *gdr_table_claim_any(struct gdr_file *file);

/* pin.c */
int gdr_pin_create(struct gdr_file *file, const struct gdr_pin_request *req, u64 *handle);
int gdr_unpin(struct gdr_file *file, u64 handle);
void gdr_unpin_all(struct gdr_file *file);
void gdr_pin_get(struct gdr_pin *pin);
void gdr_pin_put(struct gdr_pin *pin);

/* mmap.c */
void gdr_mmap_init(void);
int gdr_mmap(struct file *filp, struct vm_area_struct *vma);
void gdr_pin_unmap(struct gdr_pin *pin);
int gdr_pin_request_type(struct gdr_pin *pin, u32 type);
void gdr_wc_reserve(struct gdr_pin *pin);
void gdr_wc_release(struct gdr_pin *pin);

#endif /* GDRDRV_INTERNAL_H */
