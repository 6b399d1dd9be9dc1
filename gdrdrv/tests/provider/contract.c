// SPDX-License-Identifier: (GPL-2.0 OR MIT)
/*
 * The five nvidia_p2p_* functions, with RM's rules:
 *
 * - one lock around everything, the free callback included;
 * - non-persistent pages belong to the calling process: a put by another one finds nothing, reports success, and leaves
 *   the callback registered;
 * - a put after the callback finds nothing and reports success, too;
 * - the page table is freed once the callback returns: here it is poisoned first;
 * - addresses and lengths are checked for alignment, lengths for nothing else: 0 is a request of another kind.
 */
#include <linux/delay.h>
#include <linux/list.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/sched.h>
#include <linux/slab.h>

#include "provider.h"

struct registration {
	struct list_head node;
	struct nvidia_p2p_page_table *table;
	pid_t tgid;
	u64 va;
	u64 len;
	void (*callback)(void *data);	/* NULL: persistent */
	void *data;
};

struct nvp2p_knobs nvp2p_knobs;

static DEFINE_MUTEX(api_lock);
static LIST_HEAD(registrations);

static phys_addr_t bar_base;
static u32 bar_pages;
static struct page *ram[NVP2P_RAM_PAGES];

static u32 once(u32 *knob)
{
	return xchg(knob, 0);
}

/* Not msleep(0), which sleeps for a tick on older kernels. */
static void delay(u32 ms)
{
	if (ms)
		msleep(ms);
}

static u32 place(u32 page, u32 pages)
{
	switch (nvp2p_knobs.order) {
	case NVP2P_REVERSED:
		return pages - 1 - page;
	case NVP2P_HOLES:
		return page < pages / 2 ? 2 * page : 2 * (page - pages / 2) + 1;
	default:
		return page;
	}
}

static bool in_window(u64 va, u64 len, u64 window, u32 pages)
{
	return va >= window && va + len <= window + pages * NVP2P_PAGE;
}

static phys_addr_t physical(u64 va)
{
	if (va >= NVP2P_RAM_VA)
		return page_to_phys(ram[(va - NVP2P_RAM_VA) / NVP2P_PAGE]);
	return bar_base + place((va - NVP2P_BAR_VA) / NVP2P_PAGE, bar_pages) * NVP2P_PAGE;
}

static void free_table(struct nvidia_p2p_page_table *table, u32 entries)
{
	u32 i;

	for (i = 0; i < entries; i++) {
		memset(table->pages[i], 0xdd, sizeof(*table->pages[i]));
		kfree(table->pages[i]);
	}
	kfree(table->gpu_uuid);
	memset(table->pages, 0xdd, entries * sizeof(*table->pages));
	kvfree(table->pages);
	memset(table, 0xdd, sizeof(*table));
	kfree(table);
	atomic_dec(&nvp2p_knobs.live);
}

static struct nvidia_p2p_page_table *make_table(u64 va, u32 entries)
{
	struct nvidia_p2p_page_table *table = kzalloc(sizeof(*table), GFP_KERNEL);
	u32 i;

	if (!table)
		return NULL;
	atomic_inc(&nvp2p_knobs.live);
	table->pages = kvcalloc(entries, sizeof(*table->pages), GFP_KERNEL);
	table->gpu_uuid = kzalloc(NVIDIA_P2P_GPU_UUID_LEN, GFP_KERNEL);
	if (!table->pages || !table->gpu_uuid)
		goto fail;
	for (i = 0; i < entries; i++) {
		table->pages[i] = kzalloc(sizeof(*table->pages[i]), GFP_KERNEL);
		if (!table->pages[i])
			goto fail;
		table->pages[i]->physical_address = physical(va + i * NVP2P_PAGE) + nvp2p_knobs.bad_address;
	}
	table->version = nvp2p_knobs.bad_version ?: NVIDIA_P2P_PAGE_TABLE_VERSION;
	table->page_size = nvp2p_knobs.bad_page_size ?: NVIDIA_P2P_PAGE_SIZE_64KB;
	table->entries = entries + nvp2p_knobs.bad_entries;
#ifdef NVIDIA_P2P_PAGE_TABLE_FLAGS_CPU_CACHEABLE
	if (va >= NVP2P_RAM_VA)
		table->flags = NVIDIA_P2P_PAGE_TABLE_FLAGS_CPU_CACHEABLE;
#endif
	return table;

fail:
	free_table(table, table->pages ? i : 0);
	return NULL;
}

/* Frees the memory behind one registration, as RM does: the callback, then the table. */
static void take_back(struct registration *reg)
{
	u32 entries = reg->len / NVP2P_PAGE;

	lockdep_assert_held(&api_lock);
	list_del(&reg->node);
	delay(nvp2p_knobs.delay_callback_ms);
	reg->callback(reg->data);
	atomic_inc(&nvp2p_knobs.callbacks);
	free_table(reg->table, entries);
	kfree(reg);
}

/* The owner frees his memory. Persistent pages stay until they are put. */
void nvp2p_free_range(u64 va, u64 len)
{
	struct registration *reg, *next;

	mutex_lock(&api_lock);
	list_for_each_entry_safe(reg, next, &registrations, node) {
		if (reg->callback && reg->va < va + len && va < reg->va + reg->len)
			take_back(reg);
	}
	mutex_unlock(&api_lock);
}

void nvp2p_free_process(pid_t tgid)
{
	struct registration *reg, *next;

	mutex_lock(&api_lock);
	list_for_each_entry_safe(reg, next, &registrations, node) {
		if (reg->callback && reg->tgid == tgid)
			take_back(reg);
	}
	mutex_unlock(&api_lock);
}

static int get_pages(u64 va, u64 len, struct nvidia_p2p_page_table **table, void (*callback)(void *data), void *data)
{
	struct registration *reg;
	u32 err;

	atomic_inc(&nvp2p_knobs.gets);
	if (!IS_ALIGNED(va, NVP2P_PAGE) || !IS_ALIGNED(len, NVP2P_PAGE))
		return -EINVAL;
	err = once(&nvp2p_knobs.fail_get);
	if (err)
		return -(int)err;
	if (!in_window(va, len, NVP2P_BAR_VA, bar_pages) && !in_window(va, len, NVP2P_RAM_VA, NVP2P_RAM_PAGES))
		return -EINVAL;

	reg = kzalloc(sizeof(*reg), GFP_KERNEL);
	if (!reg)
		return -ENOMEM;
	reg->table = make_table(va, len / NVP2P_PAGE);
	if (!reg->table) {
		kfree(reg);
		return -ENOMEM;
	}
	reg->tgid = current->tgid;
	reg->va = va;
	reg->len = len;
	reg->callback = callback;
	reg->data = data;
	*table = reg->table;

	mutex_lock(&api_lock);
	list_add_tail(&reg->node, &registrations);
	mutex_unlock(&api_lock);

	if (once(&nvp2p_knobs.callback_in_get))
		nvp2p_free_range(va, len);
	delay(nvp2p_knobs.delay_get_ms);
	return 0;
}

int nvidia_p2p_get_pages(uint64_t p2p_token, uint32_t va_space, uint64_t virtual_address, uint64_t length,
			 struct nvidia_p2p_page_table **page_table, void (*free_callback)(void *data), void *data)
{
	if (!free_callback || !data)
		return -EINVAL;
	return get_pages(virtual_address, length, page_table, free_callback, data);
}
EXPORT_SYMBOL_GPL(nvidia_p2p_get_pages);

int nvidia_p2p_get_pages_persistent(uint64_t virtual_address, uint64_t length,
				    struct nvidia_p2p_page_table **page_table, uint32_t flags)
{
	if (flags & ~NVIDIA_P2P_FLAGS_FORCE_BAR1_MAPPING)
		return -EINVAL;
	return get_pages(virtual_address, length, page_table, NULL, NULL);
}
EXPORT_SYMBOL_GPL(nvidia_p2p_get_pages_persistent);

/* @tgid 0: any process. */
static int put_pages(u64 va, struct nvidia_p2p_page_table *table, pid_t tgid)
{
	struct registration *reg, *found = NULL;
	u32 err;

	atomic_inc(&nvp2p_knobs.puts);
	err = once(&nvp2p_knobs.fail_put);
	if (err)
		return -(int)err;
	delay(nvp2p_knobs.delay_put_ms);

	mutex_lock(&api_lock);
	list_for_each_entry(reg, &registrations, node) {
		/* By address and owner: the table is not looked at, it may be gone. */
		if (reg->va == va && reg->table == table && (tgid ? reg->callback && reg->tgid == tgid : !reg->callback)) {
			found = reg;
			break;
		}
	}
	if (found) {
		list_del(&found->node);
		free_table(found->table, found->len / NVP2P_PAGE);
		kfree(found);
	} else {
		atomic_inc(&nvp2p_knobs.puts_not_found);
	}
	mutex_unlock(&api_lock);
	return 0;
}

int nvidia_p2p_put_pages(uint64_t p2p_token, uint32_t va_space, uint64_t virtual_address,
			 struct nvidia_p2p_page_table *page_table)
{
	return put_pages(virtual_address, page_table, current->tgid);
}
EXPORT_SYMBOL_GPL(nvidia_p2p_put_pages);

int nvidia_p2p_put_pages_persistent(uint64_t virtual_address, struct nvidia_p2p_page_table *page_table, uint32_t flags)
{
	return flags ? -EINVAL : put_pages(virtual_address, page_table, 0);
}
EXPORT_SYMBOL_GPL(nvidia_p2p_put_pages_persistent);

int nvidia_p2p_free_page_table(struct nvidia_p2p_page_table *page_table)
{
	return 0;
}
EXPORT_SYMBOL_GPL(nvidia_p2p_free_page_table);

/* An open descriptor stands for a process's use of the GPU: when it is closed, the process's memory is freed. */
static int client_open(struct inode *inode, struct file *filp)
{
	filp->private_data = (void *)(long)current->tgid;
	return 0;
}

static int client_release(struct inode *inode, struct file *filp)
{
	nvp2p_free_process((long)filp->private_data);
	return 0;
}

static const struct file_operations client_fops = {
	.owner = THIS_MODULE,
	.open = client_open,
	.release = client_release,
};

static struct miscdevice client = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "nvp2p_client",
	.fops = &client_fops,
};

static void free_ram(void)
{
	u32 i;

	for (i = 0; i < NVP2P_RAM_PAGES && ram[i]; i++)
		__free_pages(ram[i], get_order(NVP2P_PAGE));
}

static int __init nvp2p_init(void)
{
	struct pci_dev *pdev = pci_get_device(0x1af4, 0x1110, NULL);
	u32 i;
	int err;

	if (!pdev)
		return -ENODEV;
	bar_base = pci_resource_start(pdev, 2);
	bar_pages = pci_resource_len(pdev, 2) / NVP2P_PAGE;
	err = pci_enable_device(pdev);
	pci_dev_put(pdev);
	if (err)
		return err;
	for (i = 0; i < NVP2P_RAM_PAGES; i++) {
		ram[i] = alloc_pages(GFP_KERNEL | __GFP_ZERO, get_order(NVP2P_PAGE));
		if (!ram[i]) {
			err = -ENOMEM;
			goto free;
		}
	}
	err = misc_register(&client);
	if (err)
		goto free;
	nvp2p_knobs_init();
	return 0;

free:
	free_ram();
	return err;
}

static void __exit nvp2p_exit(void)
{
	nvp2p_knobs_exit();
	misc_deregister(&client);
	free_ram();
	WARN_ON(atomic_read(&nvp2p_knobs.live));
}

module_init(nvp2p_init);
module_exit(nvp2p_exit);

MODULE_DESCRIPTION("Stand-in for the NVIDIA driver's nvidia_p2p_* functions, for tests");
MODULE_LICENSE("Dual MIT/GPL");
