/* SPDX-License-Identifier: (GPL-2.0 OR MIT) */
/*
 * Stand-in for the NVIDIA driver in tests: exports nvidia_p2p_* over the BAR of QEMU's ivshmem-plain device, with the rules
 * of the real resource manager ("RM") that a client depends on, the inconvenient ones included. Never load it on a machine
 * that matters.
 */
#ifndef NVP2P_PROVIDER_H
#define NVP2P_PROVIDER_H

#include <linux/atomic.h>
#include <linux/debugfs.h>
#include <linux/mutex.h>
#include <linux/types.h>

#include "nv-p2p.h"

#define NVP2P_PAGE		0x10000ULL

/* GPU addresses: one window backed by the BAR, one by host memory that is coherent with the CPU. */
#define NVP2P_BAR_VA		0x1000000000ULL
#define NVP2P_RAM_VA		0x2000000000ULL
#define NVP2P_RAM_PAGES		64U

enum nvp2p_order {
	NVP2P_LINEAR,	/* page i at i */
	NVP2P_REVERSED,	/* page i at n - 1 - i */
	NVP2P_HOLES,	/* even places first, then odd ones: no two neighbours adjoin */
};

/* What the next calls do wrong, and what the last ones did. Set and read through debugfs. */
struct nvp2p_knobs {
	u32 order;
	u32 fail_get;		/* errno of the next get, once */
	u32 fail_put;
	u32 delay_get_ms;
	u32 delay_put_ms;
	u32 delay_callback_ms;
	u32 callback_in_get;	/* once: frees the memory between registering and returning */
	u32 bad_version;	/* instead of the true one, if set */
	u32 bad_page_size;
	u32 bad_entries;	/* added to the true count */
	u32 bad_address;	/* added to every address */
	atomic_t live;		/* page tables handed out and not freed */
	atomic_t gets;		/* calls, whatever their result */
	atomic_t puts;
	atomic_t puts_not_found;
	atomic_t callbacks;
};

extern struct nvp2p_knobs nvp2p_knobs;

/* contract.c */
void nvp2p_free_range(u64 va, u64 len);
void nvp2p_free_process(pid_t tgid);

/* knobs.c */
void nvp2p_knobs_init(void);
void nvp2p_knobs_exit(void);

/* pte.c */
extern const struct file_operations nvp2p_pte_fops;

#endif /* NVP2P_PROVIDER_H */
