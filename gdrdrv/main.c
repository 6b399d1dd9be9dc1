// SPDX-License-Identifier: (GPL-2.0 OR MIT)
/* Module, device node, open files, /proc. */
#include "internal.h"

#include <linux/cdev.h>
#include <linux/device.h>
#include <linux/proc_fs.h>
#include <linux/rcupdate.h>
#include <linux/sched/mm.h>
#include <linux/seq_file.h>

int gdr_dbg_enabled;
module_param_named(dbg_enabled, gdr_dbg_enabled, int, 0);
MODULE_PARM_DESC(dbg_enabled, "log why requests are refused (default 0)");

static int info_enabled;
module_param(info_enabled, int, 0);
MODULE_PARM_DESC(info_enabled, "log loading and unloading (default 0)");

static int use_persistent_mapping = 1;
module_param(use_persistent_mapping, int, 0);
MODULE_PARM_DESC(use_persistent_mapping,
		 "pinned pages stay until they are unpinned, even if the memory is freed (default 1)");

static unsigned int dev_mode = 0666;
module_param(dev_mode, uint, 0);
MODULE_PARM_DESC(dev_mode, "permissions of the device node (default 0666)");

unsigned int gdr_max_pins;
module_param_named(max_pins, gdr_max_pins, uint, 0);
MODULE_PARM_DESC(max_pins, "pins per open file, 0 for no limit (default 0)");

unsigned long long gdr_max_bytes;
module_param_named(max_bytes, gdr_max_bytes, ullong, 0);
MODULE_PARM_DESC(max_bytes, "bytes pinned per open file, 0 for no limit (default 0)");

bool gdr_persistent;

/* Page tables that the driver gave us and has not got back. */
atomic_long_t gdr_nr_tables = ATOMIC_LONG_INIT(0);

static dev_t gdr_dev;
static struct cdev gdr_cdev;
static struct class *gdr_class;
static struct proc_dir_entry *gdr_proc_dir;

static void gdr_file_free(struct kref *ref)
{
	struct gdr_file *file = container_of(ref, struct gdr_file, ref);

	WARN_ON_ONCE(!RB_EMPTY_ROOT(&file->pins));
	put_pid(file->tgid);
	mmdrop(file->mm);
	mutex_destroy(&file->lock);
	kfree(file);
}

void gdr_file_get(struct gdr_file *file)
{
	kref_get(&file->ref);
}

void gdr_file_put(struct gdr_file *file)
{
	kref_put(&file->ref, gdr_file_free);
}

/* The opener's threads, and they only before an exec: a descriptor passed on or inherited is of no use. */
bool gdr_file_is_owner(const struct gdr_file *file)
{
	return task_tgid(current) == file->tgid && current->mm == file->mm;
}

static int gdr_open(struct inode *inode, struct file *filp)
{
	struct gdr_file *file;

	if (!current->mm)
		return -EACCES;
	file = kzalloc(sizeof(*file), GFP_KERNEL_ACCOUNT);
	if (!file)
		return -ENOMEM;
	kref_init(&file->ref);
	mutex_init(&file->lock);
	file->pins = RB_ROOT;
	file->next_handle = 1;
	file->tgid = get_pid(task_tgid(current));
	file->mm = current->mm;
	mmgrab(file->mm);

	/* An address space of its own, so that unmapping reaches this file's VMAs alone. It outlives them: pins hold the file. */
	address_space_init_once(&file->mapping);
	file->mapping.host = inode;
	file->mapping.a_ops = inode->i_mapping->a_ops;
	filp->f_mapping = &file->mapping;
	filp->private_data = file;
	return nonseekable_open(inode, filp);
}

/* After the last VMA is gone, in any process. */
static int gdr_release(struct inode *inode, struct file *filp)
{
	struct gdr_file *file = filp->private_data;

	gdr_unpin_all(file);
	filp->f_mapping = inode->i_mapping;
	filp->private_data = NULL;
	gdr_file_put(file);
	return 0;
}

#ifdef CONFIG_PROC_FS
static void gdr_show_fdinfo(struct seq_file *seq, struct file *filp)
{
	struct gdr_file *file = filp->private_data;
	unsigned int nr_pins;
	u64 bytes;

	mutex_lock(&file->lock);
	nr_pins = file->nr_pins;
	bytes = file->bytes;
	mutex_unlock(&file->lock);
	seq_printf(seq, "gdrdrv-pins:\t%u\ngdrdrv-bytes:\t%llu\n", nr_pins, bytes);
}
#endif

static const struct file_operations gdr_fops = {
	.owner = THIS_MODULE,
	.open = gdr_open,
	.release = gdr_release,
	.unlocked_ioctl = gdr_ioctl,
	.mmap = gdr_mmap,
#ifdef CONFIG_PROC_FS
	.show_fdinfo = gdr_show_fdinfo,
#endif
};

static int gdr_proc_params(struct seq_file *seq, void *unused)
{
	seq_printf(seq, "Version: %u.%u\n", GDRDRV_VERSION_MAJOR, GDRDRV_VERSION_MINOR);
	/* The proprietary flavor does not let a module of our licence use its symbols. */
	seq_puts(seq, "Built for NVIDIA driver flavor: opensource\n");
	seq_printf(seq, "Use persistent mapping: %s\n", gdr_persistent ? "yes" : "no");
	seq_printf(seq, "dbg_enabled: %d\n", gdr_dbg_enabled);
	seq_printf(seq, "info_enabled: %d\n", info_enabled);
	return 0;
}

static int gdr_proc_refcount(struct seq_file *seq, void *unused)
{
	seq_printf(seq, "%ld\n", atomic_long_read(&gdr_nr_tables));
	return 0;
}

static int __init gdr_proc_init(void)
{
	gdr_proc_dir = proc_mkdir("driver/gdrdrv", NULL);
	if (!gdr_proc_dir)
		return -ENOMEM;
	if (!proc_create_single("params", 0444, gdr_proc_dir, gdr_proc_params))
		goto remove;
	if (gdr_dbg_enabled && !proc_create_single("nv_get_pages_refcount", 0440, gdr_proc_dir, gdr_proc_refcount))
		goto remove;
	return 0;

remove:
	proc_remove(gdr_proc_dir);
	return -ENOMEM;
}

static char *gdr_devnode(GDR_DEVNODE_DEVICE *dev, umode_t *mode)
{
	if (mode)
		*mode = dev_mode & 0777;
	return NULL;
}

/* Installers and container tools look for the name in /proc/devices: a major number of its own, not a misc device. */
static int __init gdr_node_init(void)
{
	struct device *dev;
	int err;

	err = alloc_chrdev_region(&gdr_dev, 0, 1, KBUILD_MODNAME);
	if (err)
		return err;
	cdev_init(&gdr_cdev, &gdr_fops);
	gdr_cdev.owner = THIS_MODULE;
	err = cdev_add(&gdr_cdev, gdr_dev, 1);
	if (err)
		goto unregister;

	gdr_class = gdr_class_create(KBUILD_MODNAME);
	if (IS_ERR(gdr_class)) {
		err = PTR_ERR(gdr_class);
		goto del_cdev;
	}
	gdr_class->devnode = gdr_devnode;
	dev = device_create(gdr_class, NULL, gdr_dev, NULL, KBUILD_MODNAME);
	if (IS_ERR(dev)) {
		err = PTR_ERR(dev);
		goto destroy_class;
	}
	return 0;

destroy_class:
	class_destroy(gdr_class);
del_cdev:
	cdev_del(&gdr_cdev);
unregister:
	unregister_chrdev_region(gdr_dev, 1);
	return err;
}

static int __init gdr_init(void)
{
	int err;

	gdr_persistent = use_persistent_mapping && GDR_HAVE_PERSISTENT;
	if (use_persistent_mapping && !GDR_HAVE_PERSISTENT)
		pr_warn("built for a driver without persistent pages: use_persistent_mapping is ignored\n");
	gdr_mmap_init();

	err = gdr_proc_init();
	if (err)
		return err;
	/* Last: requests may come from here on. */
	err = gdr_node_init();
	if (err) {
		proc_remove(gdr_proc_dir);
		return err;
	}
	if (info_enabled)
		pr_info("version %u.%u loaded\n", GDRDRV_VERSION_MAJOR, GDRDRV_VERSION_MINOR);
	return 0;
}

static void __exit gdr_exit(void)
{
	device_destroy(gdr_class, gdr_dev);
	class_destroy(gdr_class);
	cdev_del(&gdr_cdev);
	unregister_chrdev_region(gdr_dev, 1);
	proc_remove(gdr_proc_dir);

	/* A free callback that just dropped its reference to the module may still have to return from our code. */
	synchronize_rcu_tasks();
	WARN_ON(atomic_long_read(&gdr_nr_tables));
	if (info_enabled)
		pr_info("unloaded\n");
}

module_init(gdr_init);
module_exit(gdr_exit);

MODULE_DESCRIPTION("CPU mappings of NVIDIA GPU memory");
MODULE_AUTHOR("The gdrcopy authors");
MODULE_LICENSE("Dual MIT/GPL");
MODULE_VERSION("2.6");
