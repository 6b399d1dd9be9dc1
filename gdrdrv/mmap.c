// SPDX-License-Identifier: (GPL-2.0 OR MIT)
/*
 * Mappings of pins.
 *
 * mmap() enters no page: a VMA is not yet in the file's address space then, so that unmap_mapping_range() would miss what
 * it holds. Pages are entered by faults, under pin->lock and only while the pin is not dead. Unmapping always covers the
 * pin's whole range of offsets. Together: once pin->dead is set and gdr_pin_unmap() has returned, no mapping reaches
 * the pin's pages, however it was split, moved or raced with.
 */
#include "internal.h"

#include <linux/pci.h>

/* Pages around the faulting one are entered with it: one fault per 2 MiB, not per 4 KiB. */
#define GDR_FAULT_SIZE		SZ_2M

static bool gdr_host_wants_device;

/* BlueField-3 as host: its PCIe controller does not take write-combined accesses to a peer's BAR. */
static const struct pci_device_id gdr_device_type_hosts[] = {
	{ PCI_DEVICE(0x15b3, 0xa2da) },
	{ PCI_DEVICE(0x15b3, 0xa2db) },
	{ }
};

void gdr_mmap_init(void)
{
	/* Handles are page numbers: a GPU page must be at least one of the host's. */
	BUILD_BUG_ON(PAGE_SIZE > GDR_GPU_PAGE_SIZE);
	gdr_host_wants_device = GDR_HAVE_DEVICE_TYPE && pci_dev_present(gdr_device_type_hosts);
}

/*
 * On x86 the memory type of a page that a fault enters is the one registered for the physical address, whatever the VMA
 * asks for, and uncached if there is none. Hence the registration, for each run.
 */
void gdr_wc_reserve(struct gdr_pin *pin)
{
	unsigned int i;

	lockdep_assert_held(&pin->lock);
	for (i = 0; i < pin->nr_runs; i++) {
		struct gdr_run *run = &pin->runs[i];

		run->wc = !arch_io_reserve_memtype_wc(run->paddr, run->len);
		if (!run->wc)
			pr_warn_once("another user of the BAR rules out write-combining: mappings are slow\n");
	}
}

/* Called once, by whoever gives the pages back: no page is mapped any more, and the runs no longer change. */
void gdr_wc_release(struct gdr_pin *pin)
{
	unsigned int i;

	for (i = 0; i < pin->nr_runs; i++) {
		struct gdr_run *run = &pin->runs[i];

		if (run->wc)
			arch_io_free_memtype_wc(run->paddr, run->len);
		run->wc = false;
	}
}

void gdr_pin_unmap(struct gdr_pin *pin)
{
	unmap_mapping_range(&pin->file->mapping, pin->handle << PAGE_SHIFT, pin->size, 1);
}

/* Accesses of different cacheability to one page are not coherent: each kind of memory has its types. */
static bool gdr_type_possible(const struct gdr_pin *pin, u32 type)
{
	switch (type) {
	case GDRDRV_MAPPING_WC:
		return !pin->cacheable;
	case GDRDRV_MAPPING_CACHED:
		return pin->cacheable;
	case GDRDRV_MAPPING_DEVICE:
		return !pin->cacheable && GDR_HAVE_DEVICE_TYPE;
	default:
		return false;
	}
}

int gdr_pin_request_type(struct gdr_pin *pin, u32 type)
{
	int err = 0;

	if (type > GDRDRV_MAPPING_DEVICE)
		return -EINVAL;
	mutex_lock(&pin->lock);
	if (pin->nr_vmas)
		err = -EBUSY;
	else if (type != GDRDRV_MAPPING_NONE && !gdr_type_possible(pin, type))
		err = -EOPNOTSUPP;
	else
		pin->requested_type = type;
	mutex_unlock(&pin->lock);
	return err;
}

static u32 gdr_choose_type(const struct gdr_pin *pin)
{
	if (pin->requested_type)
		return pin->requested_type;
	if (pin->cacheable)
		return GDRDRV_MAPPING_CACHED;
	return gdr_host_wants_device ? GDRDRV_MAPPING_DEVICE : GDRDRV_MAPPING_WC;
}

static const struct gdr_run *gdr_find_run(const struct gdr_pin *pin, u64 offset)
{
	unsigned int low = 0, high = pin->nr_runs;

	while (low < high) {
		unsigned int mid = low + (high - low) / 2;
		const struct gdr_run *run = &pin->runs[mid];

		if (offset < run->offset)
			high = mid;
		else if (offset - run->offset < run->len)
			return run;
		else
			low = mid + 1;
	}
	return NULL;
}

static vm_fault_t gdr_insert(struct vm_fault *vmf, const struct gdr_run *run, u64 skip)
{
	struct vm_area_struct *vma = vmf->vma;
	unsigned long faulting = vmf->address & PAGE_MASK;
	unsigned long window = round_down(faulting, GDR_FAULT_SIZE);
	unsigned long gpu_page = faulting - (run->offset + skip) % GDR_GPU_PAGE_SIZE;
	unsigned long pfn = PHYS_PFN(run->paddr + skip);
	unsigned long start, end, addr;
	vm_fault_t ret;

	/* The faulting page first: it alone decides about success. */
	ret = vmf_insert_pfn(vma, faulting, pfn);
	if (ret != VM_FAULT_NOPAGE)
		return ret;

	/* GPU pages, which begin at multiples of their size from this one's begin, are entered whole at the window's ends. */
	start = window - (window - gpu_page) % GDR_GPU_PAGE_SIZE;
	end = window + GDR_FAULT_SIZE;
	end += (gpu_page - end) % GDR_GPU_PAGE_SIZE;
	start = max(vma->vm_start, start);
	end = min(vma->vm_end, end);
	if (faulting - start > skip)
		start = faulting - skip;
	if (end - faulting > run->len - skip)
		end = faulting + (run->len - skip);
	for (addr = start; addr < end; addr += PAGE_SIZE) {
		if (vmf_insert_pfn(vma, addr, pfn + (long)(addr - faulting) / (long)PAGE_SIZE) != VM_FAULT_NOPAGE)
			break;
	}
	return ret;
}

/* May run without mmap_lock: uses nothing but the VMA, its pin, and what pin->lock protects. */
static vm_fault_t gdr_vm_fault(struct vm_fault *vmf)
{
	struct gdr_pin *pin = vmf->vma->vm_private_data;
	u64 offset = (u64)(vmf->pgoff - pin->handle) << PAGE_SHIFT;
	vm_fault_t ret = VM_FAULT_SIGBUS;
	const struct gdr_run *run;

	if (vmf->vma->vm_mm != pin->file->mm)
		return ret;
	mutex_lock(&pin->lock);
	if (!pin->dead) {
		run = gdr_find_run(pin, offset);
		if (run)
			ret = gdr_insert(vmf, run, offset - run->offset);
	}
	mutex_unlock(&pin->lock);
	return ret;
}

/* A VMA was split or is about to be moved. */
static void gdr_vm_open(struct vm_area_struct *vma)
{
	struct gdr_pin *pin = vma->vm_private_data;

	gdr_pin_get(pin);
	mutex_lock(&pin->lock);
	pin->nr_vmas++;
	mutex_unlock(&pin->lock);
}

static void gdr_vm_close(struct vm_area_struct *vma)
{
	struct gdr_pin *pin = vma->vm_private_data;

	mutex_lock(&pin->lock);
	if (!--pin->nr_vmas) {
		pin->type = GDRDRV_MAPPING_NONE;
		pin->requested_type = GDRDRV_MAPPING_NONE;
	}
	mutex_unlock(&pin->lock);
	gdr_pin_put(pin);
}

/* The library hands the address out: a mapping stays where it is. */
static int gdr_vm_mremap(struct vm_area_struct *vma)
{
	return -EINVAL;
}

static const struct vm_operations_struct gdr_vm_ops = {
	.open = gdr_vm_open,
	.close = gdr_vm_close,
	.fault = gdr_vm_fault,
	.mremap = gdr_vm_mremap,
};

/* Makes the VMA one of @pin. The caller's reference and count become the VMA's. */
static void gdr_set_up_vma(struct vm_area_struct *vma, struct gdr_pin *pin, u32 type)
{
	gdr_vm_flags_set(vma, VM_IO | VM_PFNMAP | VM_DONTEXPAND | VM_DONTDUMP | VM_DONTCOPY);
	gdr_vm_flags_clear(vma, VM_MAYEXEC);

	switch (type) {
	case GDRDRV_MAPPING_WC:
		vma->vm_page_prot = pgprot_writecombine(vma->vm_page_prot);
		break;
	case GDRDRV_MAPPING_DEVICE:
		vma->vm_page_prot = pgprot_device(vma->vm_page_prot);
		break;
	}
	vma->vm_private_data = pin;
	vma->vm_ops = &gdr_vm_ops;
}

/* Takes the pin's one mapping. */
static int gdr_claim_mapping(struct gdr_pin *pin, u64 size, u32 *type)
{
	int err = -EINVAL;

	if (pin->skew || size > pin->size)
		return err;
	mutex_lock(&pin->lock);
	if (!pin->dead && !pin->nr_vmas) {
		pin->nr_vmas = 1;
		pin->type = gdr_choose_type(pin);
		*type = pin->type;
		err = 0;
	}
	mutex_unlock(&pin->lock);
	return err;
}

int gdr_mmap(struct file *filp, struct vm_area_struct *vma)
{
	struct gdr_file *file = filp->private_data;
	struct gdr_pin *pin;
	u32 type;
	int err;

	if (!gdr_file_is_owner(file))
		return -EACCES;
	/* A private mapping would hand out copies, under page offsets of the kernel's own. */
	if (!(vma->vm_flags & VM_SHARED))
		return -EINVAL;
	if (vma->vm_flags & VM_EXEC)
		return -EACCES;

	pin = gdr_table_find(file, vma->vm_pgoff);
	if (!pin)
		return -EINVAL;
	err = gdr_claim_mapping(pin, vma->vm_end - vma->vm_start, &type);
	if (err) {
		gdr_pin_put(pin);
		return err;
	}
	gdr_set_up_vma(vma, pin, type);
	return 0;
}
