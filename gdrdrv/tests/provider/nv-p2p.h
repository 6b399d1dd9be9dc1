/* SPDX-License-Identifier: MIT */
/*
 * What a build without the NVIDIA driver needs of its nv-p2p.h: the same names, tags, members and prototypes, because
 * symbol versions are computed from them. With NVP2P_TABLE_1 the page table is that of drivers before 580.
 */
#ifndef NV_P2P_H
#define NV_P2P_H

#define NVIDIA_P2P_PAGE_TABLE_VERSION_COMPATIBLE(table)					\
	((table)->version >> 16 == NVIDIA_P2P_PAGE_TABLE_VERSION >> 16 &&		\
	 ((table)->version & 0xffff) >= (NVIDIA_P2P_PAGE_TABLE_VERSION & 0xffff))

#define NVIDIA_P2P_GPU_UUID_LEN			16
#define NVIDIA_P2P_CAP_GET_PAGES_PERSISTENT_API
#define NVIDIA_P2P_FLAGS_FORCE_BAR1_MAPPING	1

enum nvidia_p2p_page_size_type {
	NVIDIA_P2P_PAGE_SIZE_4KB = 0,
	NVIDIA_P2P_PAGE_SIZE_64KB,
	NVIDIA_P2P_PAGE_SIZE_128KB,
	NVIDIA_P2P_PAGE_SIZE_COUNT
};

typedef struct nvidia_p2p_page {
	uint64_t physical_address;
	union nvidia_p2p_request_registers {
		struct {
			uint32_t wreqmb_h;
			uint32_t rreqmb_h;
			uint32_t rreqmb_0;
			uint32_t reserved[3];
		} fermi;
	} registers;
} nvidia_p2p_page_t;

#ifdef NVP2P_TABLE_1
#define NVIDIA_P2P_PAGE_TABLE_VERSION		0x00010002
#else
#define NVIDIA_P2P_PAGE_TABLE_VERSION		0x00020000
#define NVIDIA_P2P_PAGE_TABLE_FLAGS_CPU_CACHEABLE	1
#endif

typedef struct nvidia_p2p_page_table {
	uint32_t version;
	uint32_t page_size;
	struct nvidia_p2p_page **pages;
	uint32_t entries;
	uint8_t *gpu_uuid;
#ifndef NVP2P_TABLE_1
	uint32_t flags;
#endif
} nvidia_p2p_page_table_t;

int nvidia_p2p_get_pages(uint64_t p2p_token, uint32_t va_space, uint64_t virtual_address, uint64_t length,
			 struct nvidia_p2p_page_table **page_table, void (*free_callback)(void *data), void *data);
int nvidia_p2p_put_pages(uint64_t p2p_token, uint32_t va_space, uint64_t virtual_address,
			 struct nvidia_p2p_page_table *page_table);
int nvidia_p2p_get_pages_persistent(uint64_t virtual_address, uint64_t length,
				    struct nvidia_p2p_page_table **page_table, uint32_t flags);
int nvidia_p2p_put_pages_persistent(uint64_t virtual_address, struct nvidia_p2p_page_table *page_table, uint32_t flags);
int nvidia_p2p_free_page_table(struct nvidia_p2p_page_table *page_table);

#endif /* NV_P2P_H */
