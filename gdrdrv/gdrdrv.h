/* SPDX-License-Identifier: ((GPL-2.0 WITH Linux-syscall-note) OR MIT) */
/*
 * Interface of /dev/gdrdrv: pin a range of GPU memory, map the pin.
 *
 * Little-endian, 64-bit only. Numbers, layouts and errors are those of gdrdrv 2.6, so that libraries written for it work
 * unchanged. The size field of most request numbers is that of a pointer and not of the argument: they are frozen, do not
 * compute copies from them.
 */
#ifndef GDRDRV_H
#define GDRDRV_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define GDRDRV_VERSION_MAJOR		2
#define GDRDRV_VERSION_MINOR		6
#define GDRDRV_VERSION			((GDRDRV_VERSION_MAJOR << 16) | GDRDRV_VERSION_MINOR)

/* Oldest library interface that is served. */
#define GDRDRV_MINIMUM_API_VERSION	(2 << 16)

#define GDRDRV_IOC_MAGIC		0xDA

#define GDRDRV_IOC_PIN_BUFFER		_IOWR(GDRDRV_IOC_MAGIC, 1, struct gdrdrv_pin_buffer)
#define GDRDRV_IOC_UNPIN_BUFFER		_IOWR(GDRDRV_IOC_MAGIC, 2, __u64)
#define GDRDRV_IOC_GET_CB_FLAG		_IOWR(GDRDRV_IOC_MAGIC, 3, __u64)
#define GDRDRV_IOC_GET_INFO		_IOWR(GDRDRV_IOC_MAGIC, 4, __u64)
#define GDRDRV_IOC_GET_INFO_V2		_IOWR(GDRDRV_IOC_MAGIC, 5, __u64)
#define GDRDRV_IOC_GET_ATTR		_IOWR(GDRDRV_IOC_MAGIC, 6, __u64)
#define GDRDRV_IOC_PIN_BUFFER_V2	_IOWR(GDRDRV_IOC_MAGIC, 7, struct gdrdrv_pin_buffer_v2)
#define GDRDRV_IOC_REQ_MAPPING_TYPE	_IOWR(GDRDRV_IOC_MAGIC, 8, __u64)
#define GDRDRV_IOC_GET_VERSION		_IOWR(GDRDRV_IOC_MAGIC, 255, __u64)

/*
 * Pins the GPU pages of 64 KiB that [addr, addr + size) touches. The handle names the pin in this open file, and
 * handle << PAGE_SHIFT is the offset to pass to mmap() with MAP_SHARED.
 */
struct gdrdrv_pin_buffer {
	__u64 addr;
	__u64 size;
	__u64 p2p_token;	/* 0 when pages are pinned persistently */
	__u32 va_space;		/* 0 when pages are pinned persistently */
	__u32 pad;
	__u64 handle;		/* out */
};

#define GDRDRV_PIN_FLAG_DEFAULT		0
#define GDRDRV_PIN_FLAG_FORCE_PCIE	1	/* through BAR1 even if the memory is coherent with the CPU */

struct gdrdrv_pin_buffer_v2 {
	__u64 addr;
	__u64 size;
	__u32 flags;
	__u32 pad;
	__u64 handle;		/* out */
};

/* Unmaps what is mapped of the pin and releases its pages. */
struct gdrdrv_unpin_buffer {
	__u64 handle;
};

/* flag is 1 once the driver has taken the pages back; never when pages are pinned persistently. */
struct gdrdrv_get_cb_flag {
	__u64 handle;
	__u32 flag;		/* out */
	__u32 pad;
};

#define GDRDRV_MAPPING_NONE		0
#define GDRDRV_MAPPING_WC		1	/* write-combined */
#define GDRDRV_MAPPING_CACHED		2
#define GDRDRV_MAPPING_DEVICE		3

struct gdrdrv_get_info {
	__u64 handle;
	__u64 va;		/* out, as all below: start of the first pinned page */
	__u64 mapped_size;	/* bytes pinned */
	__u32 page_size;
	__u32 tsc_khz;		/* 0 where the cycle counter has no known rate */
	__u64 tm_cycles;	/* cycles that pinning took */
	__u32 mapped;
	__u32 wc_mapping;
};

struct gdrdrv_get_info_v2 {
	__u64 handle;
	__u64 va;
	__u64 mapped_size;
	__u32 page_size;
	__u32 tsc_khz;
	__u64 tm_cycles;
	__u32 mapping_type;	/* GDRDRV_MAPPING_* */
	__u32 pad;
};

#define GDRDRV_ATTR_PERSISTENT_MAPPING	1
#define GDRDRV_ATTR_FORCE_PCIE		2
/* Not in gdrdrv 2.6, which answers EINVAL: GDRDRV_FEATURE_* of this module. */
#define GDRDRV_ATTR_FEATURES		0x47440001

#define GDRDRV_FEATURE_PARTIAL_UNMAP	(1 << 0)	/* any part of a mapping can be unmapped by itself */
#define GDRDRV_FEATURE_WC_PER_RUN	(1 << 1)	/* pages that are not contiguous are write-combined, too */
#define GDRDRV_FEATURE_HANDLES_FROM_1	(1 << 2)	/* 0 is never a handle */

struct gdrdrv_get_attr {
	__u32 attr;
	__u32 val;		/* out */
};

/* Asks for the type of the next mapping of the pin; GDRDRV_MAPPING_NONE withdraws the request. */
struct gdrdrv_req_mapping_type {
	__u64 handle;
	__u32 mapping_type;
	__u32 pad;
};

struct gdrdrv_get_version {
	__u32 gdrdrv_version;		/* out */
	__u32 minimum_gdr_api_version;	/* out */
};

#endif /* GDRDRV_H */
