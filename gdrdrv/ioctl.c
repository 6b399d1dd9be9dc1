// SPDX-License-Identifier: (GPL-2.0 OR MIT)
/* Requests: copy in, look up, act, copy out. */
#include "internal.h"

static void __user *gdr_user(unsigned long arg)
{
	return (void __user *)arg;
}

/* Pins and reports the handle, or takes all back. */
static int gdr_pin_and_report(struct gdr_file *file, const struct gdr_pin_request *req, __u64 __user *to)
{
	u64 handle;
	int err;

	err = gdr_pin_create(file, req, &handle);
	if (err)
		return err;
	if (put_user(handle, to)) {
		gdr_unpin(file, handle);
		return -EFAULT;
	}
	return 0;
}

static int gdr_ioctl_pin(struct gdr_file *file, struct gdrdrv_pin_buffer __user *arg)
{
	struct gdrdrv_pin_buffer params;
	struct gdr_pin_request req = { };

	if (copy_from_user(&params, arg, sizeof(params)))
		return -EFAULT;
	req.addr = params.addr;
	req.size = params.size;
	req.token = params.p2p_token;
	req.va_space = params.va_space;
	return gdr_pin_and_report(file, &req, &arg->handle);
}

static int gdr_ioctl_pin_v2(struct gdr_file *file, struct gdrdrv_pin_buffer_v2 __user *arg)
{
	struct gdrdrv_pin_buffer_v2 params;
	struct gdr_pin_request req = { };

	if (copy_from_user(&params, arg, sizeof(params)))
		return -EFAULT;
	/* Libraries in use do not clear the padding. */
	req.addr = params.addr;
	req.size = params.size;
	req.flags = params.flags;
	return gdr_pin_and_report(file, &req, &arg->handle);
}

static int gdr_ioctl_unpin(struct gdr_file *file, struct gdrdrv_unpin_buffer __user *arg)
{
	struct gdrdrv_unpin_buffer params;

	if (copy_from_user(&params, arg, sizeof(params)))
		return -EFAULT;
	return gdr_unpin(file, params.handle);
}

static int gdr_ioctl_cb_flag(struct gdr_file *file, struct gdrdrv_get_cb_flag __user *arg)
{
	struct gdrdrv_get_cb_flag params;
	struct gdr_pin *pin;

	if (copy_from_user(&params, arg, sizeof(params)))
		return -EFAULT;
	pin = gdr_table_find(file, params.handle);
	if (!pin)
		return -EINVAL;
	mutex_lock(&pin->lock);
	params.flag = pin->taken_back;
	mutex_unlock(&pin->lock);
	gdr_pin_put(pin);
	return copy_to_user(arg, &params, sizeof(params)) ? -EFAULT : 0;
}

static int gdr_fill_info(struct gdr_file *file, u64 handle, struct gdrdrv_get_info_v2 *info)
{
	struct gdr_pin *pin = gdr_table_find(file, handle);

	if (!pin)
		return -EINVAL;
	memset(info, 0, sizeof(*info));
	info->handle = handle;
	info->va = pin->va;
	info->mapped_size = pin->size;
	info->page_size = GDR_GPU_PAGE_SIZE;
	info->tsc_khz = gdr_tsc_khz();
	info->tm_cycles = pin->tm_cycles;
	mutex_lock(&pin->lock);
	info->mapping_type = pin->type;
	mutex_unlock(&pin->lock);
	gdr_pin_put(pin);
	return 0;
}

static int gdr_ioctl_info_v2(struct gdr_file *file, struct gdrdrv_get_info_v2 __user *arg)
{
	struct gdrdrv_get_info_v2 info;
	u64 handle;
	int err;

	if (get_user(handle, &arg->handle))
		return -EFAULT;
	err = gdr_fill_info(file, handle, &info);
	if (err)
		return err;
	return copy_to_user(arg, &info, sizeof(info)) ? -EFAULT : 0;
}

static int gdr_ioctl_info(struct gdr_file *file, struct gdrdrv_get_info __user *arg)
{
	struct gdrdrv_get_info_v2 info;
	struct gdrdrv_get_info out = { };
	u64 handle;
	int err;

	if (get_user(handle, &arg->handle))
		return -EFAULT;
	err = gdr_fill_info(file, handle, &info);
	if (err)
		return err;
	out.handle = info.handle;
	out.va = info.va;
	out.mapped_size = info.mapped_size;
	out.page_size = info.page_size;
	out.tsc_khz = info.tsc_khz;
	out.tm_cycles = info.tm_cycles;
	out.mapped = info.mapping_type != GDRDRV_MAPPING_NONE;
	out.wc_mapping = info.mapping_type == GDRDRV_MAPPING_WC;
	return copy_to_user(arg, &out, sizeof(out)) ? -EFAULT : 0;
}

static int gdr_ioctl_attr(struct gdrdrv_get_attr __user *arg)
{
	u32 attr, val;

	if (get_user(attr, &arg->attr))
		return -EFAULT;
	switch (attr) {
	case GDRDRV_ATTR_PERSISTENT_MAPPING:
		val = gdr_persistent;
		break;
	case GDRDRV_ATTR_FORCE_PCIE:
		val = gdr_persistent && GDR_HAVE_FORCE_PCIE;
		break;
	case GDRDRV_ATTR_FEATURES:
		val = GDRDRV_FEATURE_PARTIAL_UNMAP | GDRDRV_FEATURE_WC_PER_RUN | GDRDRV_FEATURE_HANDLES_FROM_1;
		break;
	default:
		return -EINVAL;
	}
	return put_user(val, &arg->val);
}

static int gdr_ioctl_req_type(struct gdr_file *file, struct gdrdrv_req_mapping_type __user *arg)
{
	struct gdrdrv_req_mapping_type params;
	struct gdr_pin *pin;
	int err;

	if (copy_from_user(&params, arg, sizeof(params)))
		return -EFAULT;
	pin = gdr_table_find(file, params.handle);
	if (!pin)
		return -EINVAL;
	err = gdr_pin_request_type(pin, params.mapping_type);
	gdr_pin_put(pin);
	return err;
}

static int gdr_ioctl_version(struct gdrdrv_get_version __user *arg)
{
	const struct gdrdrv_get_version version = {
		.gdrdrv_version = GDRDRV_VERSION,
		.minimum_gdr_api_version = GDRDRV_MINIMUM_API_VERSION,
	};

	return copy_to_user(arg, &version, sizeof(version)) ? -EFAULT : 0;
}

long gdr_ioctl(struct file *filp, unsigned int cmd, unsigned long arg)
{
	struct gdr_file *file = filp->private_data;

	if (_IOC_TYPE(cmd) != GDRDRV_IOC_MAGIC)
		return -EINVAL;
	if (!gdr_file_is_owner(file))
		return -EACCES;

	/* Whole numbers: a request of another size is another request. */
	switch (cmd) {
	case GDRDRV_IOC_PIN_BUFFER:
		return gdr_ioctl_pin(file, gdr_user(arg));
	case GDRDRV_IOC_UNPIN_BUFFER:
		return gdr_ioctl_unpin(file, gdr_user(arg));
	case GDRDRV_IOC_GET_CB_FLAG:
		return gdr_ioctl_cb_flag(file, gdr_user(arg));
	case GDRDRV_IOC_GET_INFO:
		return gdr_ioctl_info(file, gdr_user(arg));
	case GDRDRV_IOC_GET_INFO_V2:
		return gdr_ioctl_info_v2(file, gdr_user(arg));
	case GDRDRV_IOC_GET_ATTR:
		return gdr_ioctl_attr(gdr_user(arg));
	case GDRDRV_IOC_PIN_BUFFER_V2:
		return gdr_ioctl_pin_v2(file, gdr_user(arg));
	case GDRDRV_IOC_REQ_MAPPING_TYPE:
		return gdr_ioctl_req_type(file, gdr_user(arg));
	case GDRDRV_IOC_GET_VERSION:
		return gdr_ioctl_version(gdr_user(arg));
	default:
		return -ENOTTY;
	}
}
