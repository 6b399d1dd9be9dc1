// SPDX-License-Identifier: (GPL-2.0 OR MIT)
/*
 * Pins: from the NVIDIA driver's page table to our own list of addresses, and back.
 *
 * Who gives pages back. Persistent pages are put by whoever claimed the pin from its table. Other pages are also taken
 * back by the driver, at any time, through gdr_free_callback(); pin->table, cleared under pin->lock, says who was first.
 * The registered callback owns a reference to the pin and one to the module. They are dropped by the callback, or after
 * nvidia_p2p_put_pages() if that came first.
 *
 * The driver looks non-persistent pages up by the calling process and reports success when it finds none. Only the process
 * that pinned may therefore put them. If another one drops the last reference to the file, the pin stays, dead and
 * unmapped, until the driver calls back: at the latest when the pinning process ends.
 */
#include "internal.h"

void gdr_pin_get(struct gdr_pin *pin)
{
	kref_get(&pin->ref);
}

static void gdr_pin_free(struct kref *ref)
{
	struct gdr_pin *pin = container_of(ref, struct gdr_pin, ref);

	WARN_ON_ONCE(pin->table);
	kvfree(pin->runs);
	gdr_file_put(pin->file);
	mutex_destroy(&pin->lock);
	kfree(pin);
}

void gdr_pin_put(struct gdr_pin *pin)
{
	kref_put(&pin->ref, gdr_pin_free);
}

static struct gdr_pin *gdr_pin_alloc(struct gdr_file *file)
{
	struct gdr_pin *pin = kzalloc(sizeof(*pin), GFP_KERNEL_ACCOUNT);

	if (!pin)
		return NULL;
	kref_init(&pin->ref);
	mutex_init(&pin->lock);
	gdr_file_get(file);
	pin->file = file;
	return pin;
}

/* Gives up the driver's hold on the pin: its callback has run, or never will. */
static void gdr_drop_callback_refs(struct gdr_pin *pin)
{
	gdr_pin_put(pin);
	module_put(THIS_MODULE);
}

/*
 * Called by the NVIDIA driver, under its own lock, in whatever process frees the memory. Must not call back into it; the
 * page table is gone once this returns.
 */
static void gdr_free_callback(void *data)
{
	struct gdr_pin *pin = data;
	bool had_table;

	mutex_lock(&pin->lock);
	pin->dead = true;
	pin->taken_back = true;
	had_table = pin->table;
	pin->table = NULL;
	mutex_unlock(&pin->lock);

	gdr_pin_unmap(pin);
	gdr_wc_release(pin);
	if (had_table)
		atomic_long_dec(&gdr_nr_tables);
	gdr_drop_callback_refs(pin);
}

/* Errors of the driver are the caller's, except those that user space has no name for. */
static int gdr_driver_error(int err)
{
	if (err == -ENOTSUPP)
		return -EOPNOTSUPP;
	return err > 0 ? -EIO : err;
}

static int gdr_get_pages(struct gdr_pin *pin, struct nvidia_p2p_page_table **table)
{
	u64 start = gdr_cycles();
	int err;

	if (pin->persistent) {
		err = gdr_get_pages_persistent(pin->va, pin->size, table, pin->pcie_flags);
	} else {
		gdr_pin_get(pin);
		__module_get(THIS_MODULE);
		err = nvidia_p2p_get_pages(pin->token, pin->va_space, pin->va, pin->size, table, gdr_free_callback, pin);
		if (err)
			gdr_drop_callback_refs(pin);
	}
	pin->tm_cycles = gdr_cycles() - start;
	if (err)
		gdr_dbg("the driver refuses to pin 0x%llx bytes: %d\n", pin->size, err);
	return gdr_driver_error(err);
}

static int gdr_check_table(const struct gdr_pin *pin, const struct nvidia_p2p_page_table *table)
{
	u32 i;

	/* Before any other field is looked at. */
	if (!NVIDIA_P2P_PAGE_TABLE_VERSION_COMPATIBLE(table)) {
		pr_err_ratelimited("page table of version 0x%08x, built for 0x%08x: rebuild for this driver\n",
				   table->version, NVIDIA_P2P_PAGE_TABLE_VERSION);
		return -EFAULT;
	}
	if (table->page_size != NVIDIA_P2P_PAGE_SIZE_64KB) {
		pr_err_ratelimited("GPU pages of kind %u, not of 64 KiB\n", table->page_size);
		return -EINVAL;
	}
	if ((u64)table->entries * GDR_GPU_PAGE_SIZE != pin->size) {
		pr_err_ratelimited("%u GPU pages for 0x%llx bytes\n", table->entries, pin->size);
		return -EIO;
	}
	for (i = 0; i < table->entries; i++) {
		if (!IS_ALIGNED(table->pages[i]->physical_address, GDR_GPU_PAGE_SIZE)) {
			pr_err_ratelimited("GPU page not aligned to its size\n");
			return -EIO;
		}
	}
	return 0;
}

/* Merges the pages into runs: with no @runs it only counts. */
static unsigned int gdr_merge_runs(const struct nvidia_p2p_page_table *table, struct gdr_run *runs)
{
	unsigned int nr = 0;
	u64 end = 0;
	u32 i;

	for (i = 0; i < table->entries; i++) {
		u64 paddr = table->pages[i]->physical_address;

		if (!nr || paddr != end) {
			if (runs) {
				runs[nr].offset = (u64)i * GDR_GPU_PAGE_SIZE;
				runs[nr].paddr = paddr;
				runs[nr].len = 0;
			}
			nr++;
		}
		if (runs)
			runs[nr - 1].len += GDR_GPU_PAGE_SIZE;
		end = paddr + GDR_GPU_PAGE_SIZE;
	}
	return nr;
}

static bool gdr_all_ram(const struct gdr_pin *pin)
{
	unsigned int i;

	for (i = 0; i < pin->nr_runs; i++) {
		if (!page_is_ram(PHYS_PFN(pin->runs[i].paddr)))
			return false;
	}
	return true;
}

/*
 * Takes over the page table that the driver returned. The driver frees it after the callback, which can come before we
 * are here: hence all of this under the lock that the callback takes first.
 */
static int gdr_adopt_table(struct gdr_pin *pin, struct nvidia_p2p_page_table *table)
{
	int err = 0;
	bool ram;

	mutex_lock(&pin->lock);
	if (pin->taken_back)
		goto unlock;
	pin->table = table;
	atomic_long_inc(&gdr_nr_tables);

	err = gdr_check_table(pin, table);
	if (err)
		goto unlock;
	pin->nr_runs = gdr_merge_runs(table, NULL);
	pin->runs = kvcalloc(pin->nr_runs, sizeof(*pin->runs), GFP_KERNEL_ACCOUNT);
	if (!pin->runs) {
		pin->nr_runs = 0;
		err = -ENOMEM;
		goto unlock;
	}
	gdr_merge_runs(table, pin->runs);

	ram = gdr_all_ram(pin);
	pin->cacheable = ram || (gdr_table_cacheable(table) && !GDR_CACHED_NEEDS_RAM);
	if (!pin->cacheable)
		gdr_wc_reserve(pin);
unlock:
	mutex_unlock(&pin->lock);
	return err;
}

static void gdr_put_persistent(struct gdr_pin *pin, struct nvidia_p2p_page_table *table)
{
	int err;

	mutex_lock(&pin->lock);
	pin->table = NULL;
	mutex_unlock(&pin->lock);

	gdr_wc_release(pin);
	err = gdr_put_pages_persistent(pin->va, table, 0);
	if (err)
		pr_err_ratelimited("the driver keeps 0x%llx bytes pinned: %d\n", pin->size, err);
	else
		atomic_long_dec(&gdr_nr_tables);
}

static void gdr_put_owned(struct gdr_pin *pin, struct nvidia_p2p_page_table *table)
{
	bool ours;
	int err;

	err = nvidia_p2p_put_pages(pin->token, pin->va_space, pin->va, table);
	if (err) {
		/* Still registered, as far as we know: as if another process had dropped the pin. */
		pr_err_ratelimited("the driver keeps 0x%llx bytes pinned: %d\n", pin->size, err);
		return;
	}

	/* The driver's lock was taken and released in between: a callback has finished, or none will come. */
	mutex_lock(&pin->lock);
	ours = pin->table;
	pin->table = NULL;
	mutex_unlock(&pin->lock);
	if (!ours)
		return;
	gdr_wc_release(pin);
	atomic_long_dec(&gdr_nr_tables);
	gdr_drop_callback_refs(pin);
}

/* Ends the life of a pin that the caller took out of its table, or never published. */
static void gdr_pin_kill(struct gdr_pin *pin)
{
	struct nvidia_p2p_page_table *table;

	mutex_lock(&pin->lock);
	pin->dead = true;
	table = pin->table;
	mutex_unlock(&pin->lock);

	/* A fault that had the lock before us has inserted its pages by now; a later one sees a dead pin. */
	gdr_pin_unmap(pin);

	if (!table)
		return;
	if (pin->persistent)
		gdr_put_persistent(pin, table);
	else if (task_tgid(current) == pin->file->tgid)
		gdr_put_owned(pin, table);
	else
		gdr_dbg("pin left to the driver's callback: its owner did not close it\n");
}

/* Fills in the range of a pin, in whole GPU pages. */
static int gdr_set_range(struct gdr_pin *pin, u64 addr, u64 size)
{
	u64 end;

	if (!addr || !size || size > GDR_MAX_PIN_SIZE)
		return -EINVAL;
	pin->va = round_down(addr, (u64)GDR_GPU_PAGE_SIZE);
	pin->skew = addr - pin->va;
	if (check_add_overflow(addr, size, &end) || check_add_overflow(end, (u64)GDR_GPU_PAGE_SIZE - 1, &end))
		return -EINVAL;
	pin->size = round_down(end, (u64)GDR_GPU_PAGE_SIZE) - pin->va;
	return 0;
}

static int gdr_set_flags(struct gdr_pin *pin, const struct gdr_pin_request *req)
{
	if (req->flags & ~GDRDRV_PIN_FLAG_FORCE_PCIE)
		return -EINVAL;
	if (pin->persistent && (req->token || req->va_space))
		return -EINVAL;
	if (req->flags && !(pin->persistent && GDR_HAVE_FORCE_PCIE))
		return -EINVAL;
	pin->token = req->token;
	pin->va_space = req->va_space;
	if (req->flags & GDRDRV_PIN_FLAG_FORCE_PCIE)
		pin->pcie_flags = GDR_FORCE_PCIE_FLAG;
	return 0;
}

/**
 * gdr_pin_create() - pin a range of GPU memory
 * @file: the caller's file
 * @req: what to pin, not yet checked
 * @handle: where to store the handle
 *
 * Return: 0 or a negative errno; on error nothing stays behind
 */
int gdr_pin_create(struct gdr_file *file, const struct gdr_pin_request *req, u64 *handle)
{
	struct nvidia_p2p_page_table *table = NULL;
	struct gdr_pin *pin;
	int err;

	pin = gdr_pin_alloc(file);
	if (!pin)
		return -ENOMEM;
	pin->persistent = gdr_persistent;
	err = gdr_set_range(pin, req->addr, req->size);
	if (err)
		goto put_pin;
	err = gdr_set_flags(pin, req);
	if (err)
		goto put_pin;

	err = gdr_table_reserve(file, pin);
	if (err)
		goto put_pin;
	err = gdr_get_pages(pin, &table);
	if (err)
		goto unreserve;
	err = gdr_adopt_table(pin, table);
	if (err)
		goto kill;

	*handle = pin->handle;
	gdr_table_publish(file, pin);
	return 0;

kill:
	gdr_pin_kill(pin);
unreserve:
	gdr_table_unreserve(file, pin);
put_pin:
	gdr_pin_put(pin);
	return err;
}

int gdr_unpin(struct gdr_file *file, u64 handle)
{
	struct gdr_pin *pin = gdr_table_claim(file, handle);

	if (!pin)
		return -EINVAL;
	gdr_pin_kill(pin);
	gdr_pin_put(pin);
	return 0;
}

void gdr_unpin_all(struct gdr_file *file)
{
	struct gdr_pin *pin;

	while ((pin = gdr_table_claim_any(file))) {
		gdr_pin_kill(pin);
		gdr_pin_put(pin);
	}
}
