// SPDX-License-Identifier: (GPL-2.0 OR MIT)
/*
 * debugfs file `pte`: write a virtual address of the calling process in hexadecimal, read what its page table entry says,
 * "PHYSICAL-ADDRESS TYPE", or "none". The emulated CPU ignores memory types: the entry is where they can be seen.
 */
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/sched.h>
#include <linux/uaccess.h>

#include "probes.h"
#include "provider.h"

/* Of the entries that the kernel writes to the PAT register, see "x86/PAT" in its log: by bits PAT, PCD, PWT. */
static const char * const types[] = { "WB", "WC", "UC-", "UC", "WB", "WP", "UC-", "WT" };

static unsigned int type_of(pgprotval_t bits)
{
	return (bits & _PAGE_PWT ? 1 : 0) | (bits & _PAGE_PCD ? 2 : 0) | (bits & _PAGE_PAT ? 4 : 0);
}

static int look_up(struct vm_area_struct *vma, unsigned long addr, unsigned long *pfn, unsigned int *type)
{
#if NVP2P_HAVE_FOLLOW_PFNMAP
	struct follow_pfnmap_args args = { .vma = vma, .address = addr };

	if (follow_pfnmap_start(&args))
		return -ENOENT;
	*pfn = args.pfn;
	*type = type_of(pgprot_val(args.pgprot));
	follow_pfnmap_end(&args);
#else
	spinlock_t *lock;
	pte_t *pte;

	if (follow_pte(vma->vm_mm, addr, &pte, &lock))
		return -ENOENT;
	__acquire(lock);	/* not in the declaration of follow_pte() */
	*pfn = pte_pfn(*pte);
	*type = type_of(pte_flags(*pte));
	pte_unmap_unlock(pte, lock);
#endif
	return 0;
}

static ssize_t entry_write(struct file *filp, const char __user *from, size_t count, loff_t *pos)
{
	unsigned long addr;
	int err = kstrtoul_from_user(from, count, 16, &addr);

	if (err)
		return err;
	filp->private_data = (void *)addr;
	*pos = 0;
	return count;
}

static ssize_t entry_read(struct file *filp, char __user *to, size_t count, loff_t *pos)
{
	unsigned long addr = (unsigned long)filp->private_data, pfn;
	struct vm_area_struct *vma;
	unsigned int type;
	char text[40];
	int err = -ENOENT, len;

	mmap_read_lock(current->mm);
	vma = find_vma(current->mm, addr);
	if (vma && addr >= vma->vm_start && vma->vm_flags & VM_PFNMAP)
		err = look_up(vma, addr, &pfn, &type);
	mmap_read_unlock(current->mm);

	if (err)
		len = scnprintf(text, sizeof(text), "none\n");
	else
		len = scnprintf(text, sizeof(text), "%llx %s\n", (u64)pfn << PAGE_SHIFT, types[type]);
	return simple_read_from_buffer(to, count, pos, text, len);
}

const struct file_operations nvp2p_pte_fops = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.read = entry_read,
	.write = entry_write,
};
