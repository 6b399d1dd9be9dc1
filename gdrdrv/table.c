// SPDX-License-Identifier: (GPL-2.0 OR MIT)
/*
 * The pins of a file by handle. A handle is a page number: a pin owns the numbers [handle, handle + pages), because mmap
 * offsets are handles and an offset inside a mapping must not be another pin's.
 */
#include "internal.h"

static u64 gdr_pages(const struct gdr_pin *pin)
{
	return pin->size >> PAGE_SHIFT;
}

/* The pin with the lowest handle of those that end after @handle. */
static struct gdr_pin *gdr_table_first_after(struct gdr_file *file, u64 handle)
{
	struct rb_node *node = file->pins.rb_node;
	struct gdr_pin *first = NULL;

	lockdep_assert_held(&file->lock);
	while (node) {
		struct gdr_pin *pin = rb_entry(node, struct gdr_pin, node);

		if (pin->handle + gdr_pages(pin) > handle) {
			first = pin;
			node = node->rb_left;
		} else {
			node = node->rb_right;
		}
	}
	return first;
}

/* Next fit: a handle is not used again soon, so that one kept too long names nothing rather than another pin. */
static int gdr_table_find_free(struct gdr_file *file, u64 pages, u64 *handle)
{
	u64 start = file->next_handle;
	bool wrapped = false;

	lockdep_assert_held(&file->lock);
	for (;;) {
		struct gdr_pin *pin;

		if (start + pages > GDR_HANDLE_END) {
			if (wrapped)
				return -ENOMEM;
			wrapped = true;
			start = 1;
		}
		pin = gdr_table_first_after(file, start);
		if (!pin || pin->handle >= start + pages) {
			*handle = start;
			return 0;
		}
		start = pin->handle + gdr_pages(pin);
	}
}

static void gdr_table_insert(struct gdr_file *file, struct gdr_pin *pin)
{
	struct rb_node **link = &file->pins.rb_node;
	struct rb_node *parent = NULL;

	lockdep_assert_held(&file->lock);
	while (*link) {
		parent = *link;
		if (pin->handle < rb_entry(parent, struct gdr_pin, node)->handle)
			link = &parent->rb_left;
		else
			link = &parent->rb_right;
	}
	rb_link_node(&pin->node, parent, link);
	rb_insert_color(&pin->node, &file->pins);
}

static void gdr_table_erase(struct gdr_file *file, struct gdr_pin *pin)
{
	lockdep_assert_held(&file->lock);
	rb_erase(&pin->node, &file->pins);
	file->nr_pins--;
	file->bytes -= pin->size;
}

static struct gdr_pin *gdr_table_lookup(struct gdr_file *file, u64 handle)
{
	struct gdr_pin *pin = gdr_table_first_after(file, handle);

	return pin && pin->handle == handle && pin->published ? pin : NULL;
}

/**
 * gdr_table_reserve() - give a pin its handle
 * @file: the file
 * @pin: pin whose size is set
 *
 * The handle is found by nobody before gdr_table_publish().
 *
 * Return: 0, or -ENOMEM if a limit is reached
 */
int gdr_table_reserve(struct gdr_file *file, struct gdr_pin *pin)
{
	int err = -ENOMEM;

	mutex_lock(&file->lock);
	if (gdr_max_pins && file->nr_pins >= gdr_max_pins)
		goto unlock;
	if (gdr_max_bytes && (pin->size > gdr_max_bytes || file->bytes > gdr_max_bytes - pin->size))
		goto unlock;
	err = gdr_table_find_free(file, gdr_pages(pin), &pin->handle);
	if (err)
		goto unlock;
	gdr_table_insert(file, pin);
	file->next_handle = pin->handle + gdr_pages(pin);
	file->nr_pins++;
	file->bytes += pin->size;
unlock:
	mutex_unlock(&file->lock);
	return err;
}

void gdr_table_publish(struct gdr_file *file, struct gdr_pin *pin)
{
	mutex_lock(&file->lock);
	pin->published = true;
	mutex_unlock(&file->lock);
}

void gdr_table_unreserve(struct gdr_file *file, struct gdr_pin *pin)
{
	mutex_lock(&file->lock);
	gdr_table_erase(file, pin);
	mutex_unlock(&file->lock);
}

/* The pin of exactly this handle with a reference for the caller, or NULL. */
struct gdr_pin *gdr_table_find(struct gdr_file *file, u64 handle)
{
	struct gdr_pin *pin;

	mutex_lock(&file->lock);
	pin = gdr_table_lookup(file, handle);
	if (pin)
		gdr_pin_get(pin);
	mutex_unlock(&file->lock);
	return pin;
}

/* Takes the pin out of the table: of two callers that claim one handle, one gets it, with the table's reference. */
struct gdr_pin *gdr_table_claim(struct gdr_file *file, u64 handle)
{
	struct gdr_pin *pin;

	mutex_lock(&file->lock);
	pin = gdr_table_lookup(file, handle);
	if (pin)
		gdr_table_erase(file, pin);
	mutex_unlock(&file->lock);
	return pin;
}

/* Claims some pin; NULL if there is none left. */
struct gdr_pin *gdr_table_claim_any(struct gdr_file *file)
{
	struct rb_node *node;
	struct gdr_pin *pin = NULL;

	mutex_lock(&file->lock);
	node = rb_first(&file->pins);
	if (node) {
		pin = rb_entry(node, struct gdr_pin, node);
		gdr_table_erase(file, pin);
	}
	mutex_unlock(&file->lock);
	return pin;
}
